//! Transfers of KV caches between the servers of a fleet.

use crate::failure::{CommandError, CommandResult};
use clap::Args;
use samite::serve::{KvTransferOptions, TransferSecret};
use std::path::PathBuf;

/// Flags of transfers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Fleet")]
pub struct TransferArgs {
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
}

impl TransferArgs {
    /// Returns the options of transfers, if they are enabled.
    pub fn options(&self) -> CommandResult<Option<KvTransferOptions>> {
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
