//! Devices behind ggml's RPC protocol: a client and a server on the loopback interface must give
//! the same results as the device itself.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_core::environment::{Connection, Listener, Network, SystemNetwork};
use samite_core::{
    Backend, CancelToken, DType, Device, Environment, Error, Graph, Layout, PlacedGraph,
    RunControl, TensorGroup, Usage,
};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_rpc::{ClientOptions, Protocol, RpcBackend, Server, ServerOptions};
use samite_testing::{ContractOutcome, Suite, check_contract, run_suite};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Serves devices on the loopback interface and returns the address.
fn serve(devices: Vec<Arc<dyn Device>>, options: ServerOptions) -> String {
    let listener = SystemNetwork.listen("127.0.0.1:0").unwrap();
    let address = listener.address().unwrap();
    let server = Server::new(devices, options);
    std::thread::spawn(move || server.serve(&*listener));
    address
}

/// Returns options for each protocol.
fn protocols() -> [ServerOptions; 2] {
    [7, 8].map(|major| ServerOptions {
        protocol: Protocol::for_major(major).unwrap(),
        ..ServerOptions::default()
    })
}

fn connect(address: &str) -> Vec<Arc<dyn Device>> {
    let backend = RpcBackend::connect(&[address], &ClientOptions::default());
    assert_eq!(backend.rejected(), []);
    backend.devices().to_vec()
}

fn reference(options: ReferenceOptions) -> Arc<dyn Device> {
    ReferenceDevice::new(options)
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
    let lent = vec![
        reference(ReferenceOptions::default()),
        reference(asynchronous),
        cpu(),
    ];
    for options in protocols() {
        let devices = connect(&serve(lent.clone(), options));
        let names: Vec<_> = devices.iter().map(|device| device.name()).collect();
        assert_eq!(names, ["RPC0", "RPC1", "RPC2"]);
        for device in devices {
            let report = check_contract(&device);
            for (name, outcome) in &report.checks {
                let is_bad = matches!(outcome, ContractOutcome::Failed(_));
                assert!(!is_bad, "{}: {name}: {outcome:?}", device.name());
            }
        }
    }
}

#[test]
fn results_match_those_of_the_local_device() {
    let suite = Suite::new();
    let run = |device: &Arc<dyn Device>, filter: Option<&str>| match filter {
        None => suite.run(device),
        _ => run_suite(device, filter, &mut |_| {}),
    };
    let [old, new] = protocols();
    let reference = reference(ReferenceOptions::default());
    for (device, filter, options, min_compared) in [
        (cpu(), None, new, 120),
        (
            Arc::clone(&reference),
            Some("mul"),
            ServerOptions::default(),
            3,
        ),
        (reference, Some("glu"), old, 7),
    ] {
        let remote = connect(&serve(vec![Arc::clone(&device)], options));
        let [remote] = <[_; 1]>::try_from(remote).unwrap();
        let near = run(&device, filter);
        let far = run(&remote, filter);
        assert_eq!(far.failures, []);
        let mut compared = 0;
        for (op, far) in &far.ops {
            let near = &near.ops[op];
            compared += usize::from(far.passed > 0);
            // Weights are not packed there, and samite's own operations and newer types have no
            // form.
            let is_formless = far
                .reasons
                .keys()
                .eq(["ggml's RPC protocol has no form for it"]);
            let is_packed = filter.is_none() && far.passed > 0 && far.unsupported == 0;
            assert!(
                near == far || is_formless || is_packed,
                "{op}: {far:?} instead of {near:?}"
            );
        }
        assert!(compared >= min_compared, "{filter:?}: {compared}");
    }
}

/// A network whose connections can be cut.
#[derive(Clone, Debug, Default)]
struct Wire(Arc<AtomicBool>);

#[derive(Debug)]
struct Cut {
    connection: Box<dyn Connection>,
    is_cut: Arc<AtomicBool>,
}

impl Network for Wire {
    fn connect(&self, address: &str, timeout: Duration) -> std::io::Result<Box<dyn Connection>> {
        Ok(Box::new(Cut {
            connection: SystemNetwork.connect(address, timeout)?,
            is_cut: Arc::clone(&self.0),
        }))
    }

    fn listen(&self, address: &str) -> std::io::Result<Box<dyn Listener>> {
        SystemNetwork.listen(address)
    }
}

impl Connection for Cut {
    fn send(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.is_cut.load(Ordering::SeqCst) {
            Err(std::io::ErrorKind::BrokenPipe.into())
        } else {
            self.connection.send(bytes)
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.is_cut.load(Ordering::SeqCst) {
            Ok(0)
        } else {
            self.connection.receive(buffer)
        }
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> std::io::Result<()> {
        self.connection.set_timeout(timeout)
    }
}

#[test]
fn a_lost_connection_is_a_lost_device() {
    let address = serve(vec![cpu()], ServerOptions::default());
    let wire = Wire::default();
    let options = ClientOptions {
        environment: Environment {
            network: Arc::new(wire.clone()),
            ..Environment::system()
        },
        ..ClientOptions::default()
    };
    let backend = RpcBackend::connect(&[&address], &options);
    let device = Arc::clone(&backend.devices()[0]);
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let y = graph.sqr(x).unwrap();
    let layout = Layout::contiguous(DType::F32, [4, 1, 1, 1]).unwrap();
    let tensors = [("x", layout), ("y", layout)];
    let group = TensorGroup::allocate(&device.buffer_type(), Usage::Any, &tensors).unwrap();
    let places: Vec<_> = group
        .tensors
        .iter()
        .map(|t| Some(t.tensor().clone()))
        .collect();
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    let work = PlacedGraph {
        graph: &graph,
        nodes: &[y],
        places: &places,
        workspace: None,
        compiled: None,
    };
    let mut prepared = stream.prepare(work).unwrap();
    let cancel = CancelToken::new();
    let control = RunControl {
        cancel: &cancel,
        observer: None,
    };
    let (x, y) = (group.tensors[0].tensor(), group.tensors[1].tensor());
    for value in [2f32, 3.0] {
        stream.write(x, 0, &value.to_le_bytes()).unwrap();
        stream.run(&mut *prepared, control).unwrap();
        let mut out = [0; 4];
        stream.read(y, 0, &mut out).unwrap();
        assert_eq!(f32::from_le_bytes(out), value * value);
    }
    wire.0.store(true, Ordering::SeqCst);
    let is_lost = |result: samite_core::Result<()>| match result {
        Err(Error::DeviceLost { device, message }) => {
            assert_eq!(&*device, "RPC0");
            assert!(message.contains(&address), "{message}");
        }
        other => panic!("{other:?}"),
    };
    // Computations are not awaited, so the failure may only show in the read.
    let ran = stream.run(&mut *prepared, control);
    is_lost(ran.and_then(|()| stream.read(y, 0, &mut [0; 4])));
    // From now on, every call fails at once, even after the network is restored.
    wire.0.store(false, Ordering::SeqCst);
    is_lost(stream.run(&mut *prepared, control));
    is_lost(stream.write(x, 0, &[0; 4]));
    is_lost(stream.synchronize());
    is_lost(device.buffer_type().allocate(64, Usage::Any).map(drop));
    assert!(
        !device
            .supports(graph.node(graph.ids().last().unwrap()))
            .is_yes()
            || device.memory().free.is_none()
    );
}

#[test]
fn unusable_servers_are_rejected_with_reasons() {
    let nobody = SystemNetwork.listen("127.0.0.1:0").unwrap();
    let address = nobody.address().unwrap();
    drop(nobody);
    let backend = RpcBackend::connect(&[&address], &ClientOptions::default());
    let rejected = backend.rejected();
    assert!(backend.devices().is_empty() && rejected[0].named);
    assert_eq!(rejected[0].what, address);
    // A server that speaks another version.
    let other = SystemNetwork.listen("127.0.0.1:0").unwrap();
    let address = other.address().unwrap();
    std::thread::spawn(move || {
        let mut client = other.accept().unwrap();
        client.receive(&mut [0; 64]).unwrap();
        let mut reply = 28u64.to_le_bytes().to_vec();
        reply.extend([9, 0, 0]);
        reply.resize(36, 0);
        client.send(&reply).unwrap();
        let _ = client.receive(&mut [0; 64]);
    });
    let backend = RpcBackend::connect(&[&address], &ClientOptions::default());
    let why = &backend.rejected()[0].why;
    assert!(why.contains("9.0.0") && why.contains("7.0.0"), "{why}");
}
