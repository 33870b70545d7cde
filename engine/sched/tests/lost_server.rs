//! A remote device is lost in the middle of its work, and the others continue.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{bytes, device, f32s, host, read};
use samite_core::environment::{Network, SystemNetwork};
use samite_core::{Backend, CancelToken, Error, Graph, StoredTensor};
use samite_rpc::{ClientOptions, RpcBackend, Server, ServerOptions};
use samite_sched::{Options, Scheduler};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;

/// Relays bytes between a client and the server at `address`. Returns its own address and, once the
/// client has connected, both connections.
fn relay(address: String) -> (String, std::thread::JoinHandle<[TcpStream; 2]>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = listener.local_addr().unwrap().to_string();
    let relaying = std::thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = TcpStream::connect(address).unwrap();
        for (from, to) in [(&client, &server), (&server, &client)] {
            let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(len @ 1..) = from.read(&mut buffer) {
                    if to.write_all(&buffer[..len]).is_err() {
                        break;
                    }
                }
                let _ = to.shutdown(Shutdown::Both);
            });
        }
        [client, server]
    });
    (own, relaying)
}

#[test]
fn a_lost_server_is_a_lost_device_and_others_continue() {
    let listener = SystemNetwork.listen("127.0.0.1:0").unwrap();
    let address = listener.address().unwrap();
    let server = Server::new(vec![device("lent", |_| {})], ServerOptions::default());
    let serving = Arc::clone(&server);
    std::thread::spawn(move || serving.serve(&*listener));
    let (address, relaying) = relay(address);
    let backend = RpcBackend::connect(&[address], &ClientOptions::default());
    let connections = relaying.join().unwrap();
    let [remote] = backend.devices() else {
        panic!("{:?}", backend.rejected());
    };
    let host = host();
    let weights = common::weights(remote, "w", f32s(&[4, 4]));
    let mut kept = [0; 64];
    weights.tensor().read(0, &mut kept).unwrap();
    let run = |scheduler: &mut Scheduler, weights: &Arc<StoredTensor>| {
        let mut graph = Graph::new();
        let w = graph.stored(weights).unwrap();
        let x = graph.input("x", f32s(&[4]).dtype(), [4, 1, 1, 1]).unwrap();
        let y = graph.mul_mat(w, x).unwrap();
        graph.set_output(y);
        scheduler.load(&graph)?;
        scheduler.write(x, 0, &bytes(&[1.0, 2.0, 3.0, 4.0]))?;
        scheduler.run(&CancelToken::new())?;
        read(scheduler, y, 4)
    };
    let devices = vec![Arc::clone(remote), Arc::clone(&host)];
    let mut scheduler = Scheduler::new(devices, Options::default()).unwrap();
    let expected = run(&mut scheduler, &weights).unwrap();
    assert_eq!(run(&mut scheduler, &weights).unwrap(), expected);

    for connection in connections {
        let _ = connection.shutdown(Shutdown::Both);
    }
    let error = run(&mut scheduler, &weights).unwrap_err();
    assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
    assert_eq!(scheduler.remove_device("RPC0").unwrap(), ["w"]);
    let again = common::weights(&host, "w", f32s(&[4, 4]));
    again.tensor().write(0, &kept).unwrap();
    assert_eq!(run(&mut scheduler, &again).unwrap(), expected);

    // The server has forgotten this client, and serves others.
    samite_testing::wait_until("the server has no clients and no memory", || {
        server.clients() + server.memory_in_use() == 0
    });
}
