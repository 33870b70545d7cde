//! No requests may make the RPC server panic, or keep what a client had. The input is a list of requests: a command, two bytes of length, and as many bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use samite_core::environment::Connection;
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_rpc::{Server, ServerOptions};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

static SERVER: LazyLock<Arc<Server>> = LazyLock::new(|| {
    let device = ReferenceDevice::new(ReferenceOptions {
        host_memory: true,
        ..ReferenceOptions::default()
    });
    let options = ServerOptions {
        memory: Some(1 << 20),
        ..ServerOptions::default()
    };
    Server::new(vec![device], options)
});

/// A client that has said everything.
#[derive(Debug)]
struct Said(std::io::Cursor<Vec<u8>>);

impl Connection for Said {
    fn send(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        Ok(bytes.len())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        std::io::Read::read(&mut self.0, buffer)
    }

    fn set_timeout(&mut self, _: Option<Duration>) -> std::io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|bytes: &[u8]| {
    // The greeting comes first; without it everything is refused.
    let mut requests = vec![14];
    requests.extend(24u64.to_le_bytes());
    requests.extend([0; 24]);
    let mut rest = bytes;
    while let [command, low, high, after @ ..] = rest {
        let len = usize::from(u16::from_le_bytes([*low, *high])).min(after.len());
        requests.push(command % 20);
        requests.extend((len as u64).to_le_bytes());
        requests.extend(&after[..len]);
        rest = &after[len..];
    }
    SERVER.serve_client(Box::new(Said(std::io::Cursor::new(requests))));
    assert_eq!((SERVER.clients(), SERVER.memory_in_use()), (0, 0));
});
