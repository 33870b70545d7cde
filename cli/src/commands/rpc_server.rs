//! `samite rpc-server`: shares devices with programs on other machines.

use crate::args::{DeviceArgs, ThreadArgs, number};
use crate::cpu_args::PoolArgs;
use crate::failure::{CommandError, CommandResult};
use crate::setup::{DeviceSetup, Lent};
use crate::shown::say;
use clap::Args;
use samite::registry::{RpcProtocol, Server, ServerOptions};
use std::io::Write;
use std::net::{IpAddr, ToSocketAddrs};
use std::time::Duration;

/// Flags of `samite rpc-server`.
#[derive(Debug, Args)]
#[command(
    after_help = "The protocol is that of ggml's RPC backend. It has no passwords and no encryption:
any client that can connect can compute, so let only trusted clients connect.
llama.cpp's programs use it with --rpc 127.0.0.1:50052.

Examples:
  samite rpc-server
  samite rpc-server --device cpu -t 8 --memory 16384"
)]
pub struct RpcServerArgs {
    /// Address to listen on [also: -H]
    #[arg(short = 'H', long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 for any free port
    #[arg(short, long, value_name = "PORT", default_value = "50052")]
    port: u16,
    /// Version to speak: 8 for clients with ggml 0.27 and 0.28, 7 for 0.25 and 0.26; samite's
    /// clients speak both
    #[arg(long, value_name = "VERSION", default_value = "8", value_parser = protocol)]
    protocol: &'static RpcProtocol,
    #[command(flatten)]
    devices: DeviceArgs,
    #[command(flatten)]
    threads: ThreadArgs,
    /// Maximum memory of all clients together, in MiB [default: all available]
    #[arg(long, value_name = "MIB", value_parser = mebibytes, help_heading = "Limits")]
    memory: Option<usize>,
    /// Maximum memory of each client, in MiB
    #[arg(long, value_name = "MIB", value_parser = mebibytes, help_heading = "Limits")]
    memory_per_client: Option<usize>,
    /// Maximum number of clients at the same time
    #[arg(long, value_name = "N", default_value = "64", value_parser = clients,
        help_heading = "Limits")]
    clients: usize,
    /// Seconds for a client to send its greeting, send the rest of a message, or read a reply
    #[arg(long, value_name = "SECONDS", default_value = "10",
        value_parser = clap::value_parser!(u16).range(1..), help_heading = "Limits")]
    patience: u16,
    #[command(flatten)]
    pool: PoolArgs,
}

fn protocol(text: &str) -> Result<&'static RpcProtocol, &'static str> {
    let major = text.parse().ok();
    let found = major.and_then(RpcProtocol::for_major);
    found.ok_or("the protocols are 7 and 8")
}

pub(super) fn clients(text: &str) -> Result<usize, String> {
    number(text, 1, 1 << 16)
}

/// Parses a number of MiB and returns bytes.
pub(super) fn mebibytes(text: &str) -> Result<usize, String> {
    Ok(number(text, 1, 1 << 40)? << 20)
}

/// Joins host and port.
pub(super) fn place(host: &str, port: u16) -> String {
    let host = host.trim_matches(['[', ']']);
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V6(host)) => format!("[{host}]:{port}"),
        _ => format!("{host}:{port}"),
    }
}

/// Returns whether only programs on this machine can reach the host's addresses. The system
/// resolves it, as for listening: `127.1` and `LOCALHOST` are such hosts.
pub(super) fn is_loopback(host: &str) -> bool {
    let addresses = (host.trim_matches(['[', ']']), 0).to_socket_addrs();
    addresses.is_ok_and(|mut all| all.all(|address| address.ip().to_canonical().is_loopback()))
}

pub fn run(args: RpcServerArgs) -> CommandResult {
    let pool = args.pool.pool(args.threads.threads)?;
    let Lent { devices, fallbacks } = DeviceSetup::new(&args.devices).lent(pool)?;
    let options = ServerOptions {
        protocol: args.protocol,
        memory: args.memory,
        memory_per_client: args.memory_per_client,
        clients: args.clients,
        greeting: Duration::from_secs(args.patience.into()),
        patience: Duration::from_secs(args.patience.into()),
        fallbacks,
        ..ServerOptions::default()
    };
    let network = &options.environment.network;
    let wanted = place(&args.host, args.port);
    let failed = |error| CommandError::error(format_args!("cannot listen at {wanted}: {error}"));
    let listener = network.listen(&wanted).map_err(failed)?;
    let address = listener.address().map_err(failed)?;
    if !is_loopback(&args.host) {
        say(format_args!(
            "warning: {address} can be reached from other machines, and whoever reaches it can compute and take memory: the protocol has no passwords"
        ));
    }
    let mut out = std::io::stdout().lock();
    for (number, device) in devices.iter().enumerate() {
        let (name, description) = (device.name(), device.description());
        writeln!(out, "device {number}: {name} ({description})")?;
    }
    writeln!(out, "listening at {address}")?;
    out.flush()?;
    drop(out);
    let server = Server::new(devices, options);
    server.serve(&*listener)
}
