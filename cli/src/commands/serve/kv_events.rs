//! KV cache events for routers of a fleet of servers.

use crate::args::number;
use crate::failure::{CommandError, CommandResult};
use clap::Args;
use samite::kv_events::{Publisher, PublisherOptions};
use samite::serve::KvEventSource;
use std::sync::Arc;

/// Flags of KV cache events.
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

fn block_size(text: &str) -> Result<usize, String> {
    number(text, 1, 4096)
}

/// Number of messages to keep for clients that missed them; the same as vLLM's.
const KEPT: usize = 10_000;

/// Describes a publisher to routers.
pub fn source(publisher: &Publisher) -> KvEventSource {
    KvEventSource {
        endpoint: publisher.endpoint().to_owned(),
        replay: publisher.replay().map(str::to_owned),
        topic: publisher.topic().to_owned(),
        block_size: publisher.block_size(),
    }
}

impl EventArgs {
    /// Creates the publisher of events, if it is enabled. A deterministic engine has no cache
    /// to publish.
    pub fn publisher(&self, is_deterministic: bool) -> CommandResult<Option<Arc<Publisher>>> {
        let Some(endpoint) = &self.kv_events else {
            return Ok(None);
        };
        if is_deterministic {
            return Err(CommandError::usage(
                "--kv-events: nothing is cached with --deterministic: leave one of them out",
            ));
        }
        let options = PublisherOptions {
            endpoint: endpoint.clone(),
            replay: self.kv_events_replay.clone(),
            topic: self.kv_events_topic.clone(),
            block_size: self.kv_events_block,
            kept: KEPT,
        };
        let publisher = Publisher::start(options)
            .map_err(|error| CommandError::usage(format_args!("--kv-events: {error}")))?;
        tracing::info!(endpoint = publisher.endpoint(), "events of the cache");
        Ok(Some(Arc::new(publisher)))
    }

    /// Fails if there are several models: routers expect one per process.
    pub fn check_several(&self) -> CommandResult {
        match &self.kv_events {
            None => Ok(()),
            Some(_) => Err(CommandError::usage(
                "--kv-events: routers expect one model in a process: leave --models-dir and further -m out",
            )),
        }
    }
}
