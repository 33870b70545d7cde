//! The commands, one file each.

pub mod bench;
mod chat;
mod compare;
mod completions;
pub mod dev;
mod devices;
mod embed;
mod imatrix;
mod inspect;
mod logits;
mod man;
mod merge_lora;
#[cfg(feature = "hub")]
mod models;
mod perplexity;
mod plan;
mod probe_plugin;
#[cfg(feature = "hub")]
mod pull;
mod quantize;
#[cfg(feature = "remote")]
mod remote_server;
mod rpc_server;
mod run;
#[cfg(feature = "serve")]
mod serve;
#[cfg(feature = "sim")]
mod sim;
mod synth;
mod test_ops;
mod tokenize;
mod train;

use crate::failure::CommandResult;
use crate::interrupt;
use clap::Subcommand;

/// The command to run.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate text with a language model
    Run(Box<run::RunArgs>),
    /// Download a model by name
    #[cfg(feature = "hub")]
    Pull(pull::PullArgs),
    /// List or delete downloaded models
    #[cfg(feature = "hub")]
    Models(models::ModelsArgs),
    /// Chat with a language model in the terminal
    Chat(Box<chat::ChatArgs>),
    /// Serve language models over HTTP to concurrent users and existing clients
    #[cfg(feature = "serve")]
    Serve(Box<serve::ServeArgs>),
    /// List devices, their memory and features
    Devices(devices::DevicesArgs),
    /// Explain how a model would be split across devices, from the header of its file
    Plan(plan::PlanArgs),
    /// Show the metadata and tensors of a GGUF file
    Inspect(inspect::InspectArgs),
    /// Convert text to tokens
    Tokenize(tokenize::TokenizeArgs),
    /// Convert a model's weights to other types
    Quantize(quantize::QuantizeArgs),
    /// Compute an importance matrix from a text, for quantization
    Imatrix(Box<imatrix::ImatrixArgs>),
    /// Merge LoRA adapters into a model's weights and write the result
    MergeLora(merge_lora::MergeLoraArgs),
    /// Measure prefill and decode speed
    Bench(bench::BenchArgs),
    /// Print or save a model's logits after each token
    Logits(logits::LogitsArgs),
    /// Print embeddings of texts, or relevance scores of text pairs
    Embed(Box<embed::EmbedArgs>),
    /// Measure a model's perplexity on a text
    Perplexity(perplexity::PerplexityArgs),
    /// Serve devices to programs on other machines, such as llama.cpp's with --rpc
    RpcServer(rpc_server::RpcServerArgs),
    /// Serve devices to samite on other machines, encrypted and authenticated by token
    #[cfg(feature = "remote")]
    RemoteServer(remote_server::RemoteServerArgs),
    /// Train a small language model
    Train(train::TrainArgs),
    /// Print a shell completion script
    Completions(completions::CompletionsArgs),
    /// Write manual pages
    Man(man::ManArgs),
    /// Test devices, write random models, and simulate faults
    Dev(dev::DevArgs),
    #[command(flatten)]
    Undocumented(dev::DevCommand),
    /// Test a ggml plugin; for internal use
    #[command(hide = true)]
    ProbePlugin(probe_plugin::ProbePluginArgs),
}

impl Command {
    /// Runs the command.
    pub fn run(self) -> CommandResult {
        let is_probe = matches!(self, Command::ProbePlugin(_));
        // The process that probes a plugin reports signals.
        if !is_probe {
            interrupt::handle();
        }
        match self {
            Command::Run(args) => run::run(*args),
            #[cfg(feature = "hub")]
            Command::Pull(args) => pull::run(args),
            #[cfg(feature = "hub")]
            Command::Models(args) => models::run(args),
            Command::Chat(args) => chat::run(*args),
            #[cfg(feature = "serve")]
            Command::Serve(args) => serve::run(*args),
            Command::Devices(args) => devices::run(args),
            Command::Plan(args) => plan::run(args),
            Command::Inspect(args) => inspect::run(args),
            Command::Tokenize(args) => tokenize::run(args),
            Command::Quantize(args) => quantize::run(args),
            Command::Imatrix(args) => imatrix::run(*args),
            Command::MergeLora(args) => merge_lora::run(args),
            Command::Bench(args) => bench::run(args),
            Command::Logits(args) => logits::run(args),
            Command::Embed(args) => embed::run(*args),
            Command::Perplexity(args) => perplexity::run(args),
            Command::RpcServer(args) => rpc_server::run(args),
            #[cfg(feature = "remote")]
            Command::RemoteServer(args) => remote_server::run(args),
            Command::Train(args) => train::run(args),
            Command::Completions(args) => completions::run(args),
            Command::Man(args) => man::run(args),
            Command::Dev(args) => args.command.run(),
            Command::Undocumented(command) => command.run(),
            Command::ProbePlugin(args) => probe_plugin::run(args),
        }
    }
}
