//! Flags of servers in a fleet: events of the KV cache for routers, and transfers of KV caches.

#[cfg(feature = "kv-events")]
use crate::args::number;
use crate::failure::{CommandError, CommandResult};
use clap::Args;
#[cfg(feature = "kv-events")]
use samite::kv_events::{Publisher, PublisherOptions};
#[cfg(feature = "kv-events")]
use samite::serve::KvEventSource;
use samite::serve::{KvTransferOptions, TransferSecret};
use std::path::PathBuf;
#[cfg(feature = "kv-events")]
use std::sync::Arc;

/// Flags of fleets.
#[derive(Debug, Args)]
#[command(next_help_heading = "Fleet")]
pub struct FleetArgs {
    /// Compute prompts for other servers, which fetch the KV cache at this address, such as
    /// 0.0.0.0:5600
    #[arg(long, value_name = "ADDRESS", requires = "kv_transfer_key")]
    kv_transfer: Option<String>,
    /// Host under which other servers reach this one [default: the address on which a request
    /// arrives]
    #[arg(long, value_name = "HOST", requires = "kv_transfer")]
    kv_transfer_host: Option<String>,
    /// File with a secret of at least 32 bytes that all servers of the fleet share; with it, this
    /// server fetches KV caches that requests name
    #[arg(long, value_name = "FILE")]
    kv_transfer_key: Option<PathBuf>,
    #[cfg(feature = "kv-events")]
    #[command(flatten)]
    events: EventArgs,
}

/// Flags of KV cache events.
#[cfg(feature = "kv-events")]
#[derive(Debug, Args)]
#[command(next_help_heading = "Fleet")]
pub struct EventArgs {
    /// Publish over ZeroMQ which blocks of tokens are in the cache, in vLLM's format, at this
    /// endpoint, such as tcp://*:5557. It is not encrypted
    #[arg(long, value_name = "ENDPOINT")]
    kv_events: Option<String>,
    /// Endpoint where subscribers request missed messages, such as tcp://*:5558
    #[arg(long, value_name = "ENDPOINT", requires = "kv_events")]
    kv_events_replay: Option<String>,
    /// Topic of the messages; llm-d expects kv@POD@MODEL
    #[arg(
        long,
        value_name = "TOPIC",
        default_value = "",
        hide_default_value = true,
        requires = "kv_events"
    )]
    kv_events_topic: String,
    /// Number of tokens per block
    #[arg(long, value_name = "N", default_value = "16", value_parser = block_size,
        requires = "kv_events")]
    kv_events_block: usize,
}

#[cfg(feature = "kv-events")]
fn block_size(text: &str) -> Result<usize, String> {
    number(text, 1, 4096)
}

/// Number of messages to keep for clients that missed them; the same as vLLM's.
#[cfg(feature = "kv-events")]
const KEPT: usize = 10_000;

/// Describes a publisher to routers.
#[cfg(feature = "kv-events")]
pub fn source(publisher: &Publisher) -> KvEventSource {
    KvEventSource {
        endpoint: publisher.endpoint().to_owned(),
        replay: publisher.replay().map(str::to_owned),
        topic: publisher.topic().to_owned(),
        block_size: publisher.block_size(),
    }
}

impl FleetArgs {
    /// Returns the options of transfers, if they are enabled.
    pub fn transfer(&self) -> CommandResult<Option<KvTransferOptions>> {
        let Some(path) = &self.kv_transfer_key else {
            return Ok(None);
        };
        let failed = |what: &str| {
            CommandError::usage(format_args!("--kv-transfer-key {}: {what}", path.display()))
        };
        let content = std::fs::read(path).map_err(|error| failed(&error.to_string()))?;
        let secret = TransferSecret::new(&content).ok_or_else(|| {
            failed("a secret needs 32 bytes: write one with `openssl rand -hex 32`")
        })?;
        Ok(Some(KvTransferOptions {
            listen: self.kv_transfer.clone(),
            host: self.kv_transfer_host.clone(),
            secret,
        }))
    }
}

#[cfg(feature = "kv-events")]
impl FleetArgs {
    /// Creates the publisher of events, if it is enabled. A deterministic engine has no cache
    /// to publish.
    pub fn publisher(&self, is_deterministic: bool) -> CommandResult<Option<Arc<Publisher>>> {
        let Some(endpoint) = &self.events.kv_events else {
            return Ok(None);
        };
        if is_deterministic {
            return Err(CommandError::usage(
                "--kv-events: nothing is cached with --deterministic: leave one of them out",
            ));
        }
        let options = PublisherOptions {
            endpoint: endpoint.clone(),
            replay: self.events.kv_events_replay.clone(),
            topic: self.events.kv_events_topic.clone(),
            block_size: self.events.kv_events_block,
            kept: KEPT,
        };
        let publisher = Publisher::start(options)
            .map_err(|error| CommandError::usage(format_args!("--kv-events: {error}")))?;
        tracing::info!(endpoint = publisher.endpoint(), "events of the cache");
        Ok(Some(Arc::new(publisher)))
    }

    /// Fails if there are several models: routers expect one per process.
    pub fn check_several(&self) -> CommandResult {
        match &self.events.kv_events {
            None => Ok(()),
            Some(_) => Err(CommandError::usage(
                "--kv-events: routers expect one model in a process: leave --models-dir and further -m out",
            )),
        }
    }
}
