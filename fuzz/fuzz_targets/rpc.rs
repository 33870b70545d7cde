//! No requests may make the RPC server panic or leak a client's resources. The input is a list of
//! requests: a command, two bytes of length, and that many bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_rpc::{Server, ServerOptions};
use std::sync::{Arc, LazyLock};

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

fuzz_target!(|bytes: &[u8]| {
    // The greeting comes first; without it all requests are rejected.
    let mut requests = vec![14];
    requests.extend(24u64.to_le_bytes());
    requests.extend([0; 24]);
    let mut rest = bytes;
    while let [command, low, high, after @ ..] = rest {
        let len = usize::from(u16::from_le_bytes([*low, *high])).min(after.len());
        requests.push(command % 25);
        requests.extend((len as u64).to_le_bytes());
        requests.extend(&after[..len]);
        rest = &after[len..];
    }
    if let Some(mut session) = SERVER.begin() {
        let _ = session.take(&requests, &mut |_| Ok(()));
    }
    assert_eq!((SERVER.clients(), SERVER.memory_in_use()), (0, 0));
});
