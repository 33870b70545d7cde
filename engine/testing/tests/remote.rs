//! Remote devices of a server in the same process, over gRPC and TLS on the loopback interface,
//! must give the same results as the devices themselves.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_core::{Backend, Device};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_remote::{RemoteBackend, RemoteOptions, RemoteServer, RemoteServerOptions};
use samite_testing::{ContractOutcome, Suite, check_contract};
use std::sync::Arc;

/// Serves devices and connects to them.
fn far(lent: &[Arc<dyn Device>]) -> (tempfile::TempDir, Vec<Arc<dyn Device>>) {
    let folder = tempfile::tempdir().unwrap();
    let [key, tokens] = ["key", "tokens"].map(|name| folder.path().join(name));
    let options = RemoteServerOptions {
        store: Some(folder.path().join("store")),
        ..RemoteServerOptions::new(key, tokens.clone())
    };
    let server = RemoteServer::bind(lent, "127.0.0.1:0", options).unwrap();
    let address = server.address().unwrap();
    std::thread::spawn(move || server.serve());
    let options = RemoteOptions {
        token: Some(tokens),
        ..RemoteOptions::default()
    };
    let backend = RemoteBackend::connect(&[address], &options);
    assert_eq!(backend.rejected(), []);
    (folder, backend.devices().to_vec())
}

fn cpu() -> Arc<dyn Device> {
    let mut options = CpuOptions::default();
    options.threads = Some(1);
    CpuDevice::new(options)
}

#[test]
fn devices_behind_a_server_fulfil_the_contract() {
    let asynchronous = ReferenceOptions {
        name: "asynchronous".into(),
        asynchronous: true,
        events: true,
        workspace: 64,
        ..ReferenceOptions::default()
    };
    let lent: [Arc<dyn Device>; 3] = [
        ReferenceDevice::new(ReferenceOptions::default()),
        ReferenceDevice::new(asynchronous),
        cpu(),
    ];
    let (_folder, devices) = far(&lent);
    let names: Vec<_> = devices.iter().map(|device| device.name()).collect();
    assert_eq!(names, ["remote0", "remote1", "remote2"]);
    for device in devices {
        let report = check_contract(&device);
        for (name, outcome) in &report.checks {
            let is_bad = matches!(outcome, ContractOutcome::Failed(_));
            assert!(!is_bad, "{}: {name}: {outcome:?}", device.name());
        }
    }
}

#[test]
fn results_match_those_of_the_local_device() {
    let lent = cpu();
    let (_folder, remote) = far(&[Arc::clone(&lent)]);
    let suite = Suite::new();
    let near = suite.run(&lent);
    let far = suite.run(&remote[0]);
    assert_eq!(far.failures, []);
    assert_eq!(far.ops, near.ops);
}
