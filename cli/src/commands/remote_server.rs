//! `samite remote-server`: shares devices with samite on other machines.

use super::rpc_server::{clients, mebibytes, place};
use crate::args::{DeviceArgs, ThreadArgs};
use crate::cpu_args::PoolArgs;
use crate::failure::{CommandError, CommandResult};
use crate::setup::{DeviceSetup, Lent};
use clap::Args;
use samite::cache_folder;
use samite::registry::{KEY_FILE, RemoteServer, RemoteServerOptions, TOKEN_FILE, settings_folder};
use std::io::Write;
use std::path::PathBuf;

/// Flags of `samite remote-server`.
#[derive(Debug, Args)]
#[command(
    after_help = "The connection is encrypted (gRPC over TLS 1.3). The server creates a key and a \
token at its first start. Clients need the address that it prints, which identifies the key, \
and a copy of the token file:

  samite remote-server --host 192.168.0.7
  samite run --remote 'samite://192.168.0.7:50053#…' --remote-token token …

The file has one token per line, 64 hexadecimal digits each. \
Add a token to admit another client, or remove one to reject its client from the next start on."
)]
pub struct RemoteServerArgs {
    /// Address to listen on [also: -H]
    #[arg(short = 'H', long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 for any free port
    #[arg(short, long, value_name = "PORT", default_value = "50053")]
    port: u16,
    #[command(flatten)]
    devices: DeviceArgs,
    #[command(flatten)]
    threads: ThreadArgs,
    /// File with the server's key [default: `samite/remote-key` in the settings folder]
    #[arg(long, value_name = "FILE", help_heading = "Access")]
    key: Option<PathBuf>,
    /// File with tokens [default: `samite/remote-token` in the settings folder]
    #[arg(long, value_name = "FILE", help_heading = "Access")]
    tokens: Option<PathBuf>,
    /// Folder to store pieces of weights in, so that they are sent only once [default:
    /// `samite/remote` in the cache folder]
    #[arg(long, value_name = "FOLDER", help_heading = "Limits")]
    store: Option<PathBuf>,
    /// Maximum size of --store in MiB; 0 disables it
    #[arg(
        long,
        value_name = "MIB",
        default_value = "32768",
        help_heading = "Limits"
    )]
    store_size: u32,
    /// Maximum memory of all sessions together, in MiB [default: all available]
    #[arg(long, value_name = "MIB", value_parser = mebibytes, help_heading = "Limits")]
    memory: Option<usize>,
    /// Maximum memory of each session, in MiB
    #[arg(long, value_name = "MIB", value_parser = mebibytes, help_heading = "Limits")]
    memory_per_session: Option<usize>,
    /// Maximum number of sessions at the same time
    #[arg(long, value_name = "N", default_value = "64", value_parser = clients,
        help_heading = "Limits")]
    sessions: usize,
    /// Maximum number of sessions of one token at the same time
    #[arg(long, value_name = "N", default_value = "16", value_parser = clients,
        help_heading = "Limits")]
    sessions_per_token: usize,
    #[command(flatten)]
    pool: PoolArgs,
}

pub fn run(args: RemoteServerArgs) -> CommandResult {
    let pool = args.pool.pool(args.threads.threads)?;
    // Clients query what a device supports, and use their own CPU for the rest.
    let Lent { devices, .. } = DeviceSetup::new(&args.devices).lent(pool)?;
    let of_settings = |named: &Option<PathBuf>, name: &str, flag: &str| {
        let file = named
            .clone()
            .or_else(|| Some(settings_folder()?.join(name)));
        file.ok_or_else(|| {
            CommandError::usage(format_args!(
                "--{flag}: name a file: there is no folder for settings"
            ))
        })
    };
    let key = of_settings(&args.key, KEY_FILE, "key")?;
    let tokens = of_settings(&args.tokens, TOKEN_FILE, "tokens")?;
    let store = args.store.or_else(|| Some(cache_folder()?.join("remote")));
    let options = RemoteServerOptions {
        store: store.filter(|_| args.store_size > 0),
        store_bytes: u64::from(args.store_size) << 20,
        memory: args.memory,
        memory_per_session: args.memory_per_session,
        sessions: args.sessions,
        sessions_per_token: args.sessions_per_token,
        ..RemoteServerOptions::new(key, tokens.clone())
    };
    let wanted = place(&args.host, args.port);
    let failed = |error| CommandError::error(format_args!("cannot serve at {wanted}: {error}"));
    let server = RemoteServer::bind(&devices, &wanted, options).map_err(failed)?;
    let address = server.address().map_err(failed)?;
    let mut out = std::io::stdout().lock();
    for (number, device) in devices.iter().enumerate() {
        let (name, description) = (device.name(), device.description());
        writeln!(out, "device {number}: {name} ({description})")?;
    }
    writeln!(out, "tokens: {}", tokens.display())?;
    writeln!(out, "listening at {address}")?;
    out.flush()?;
    drop(out);
    server.serve().map_err(failed)
}
