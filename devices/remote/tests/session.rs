//! Sessions: exactly-once execution over broken connections, state that is lost with the server,
//! and data that is sent only once.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Lender, Proxy, eventually, floats};
use samite_core::{
    CancelToken, DType, Device, DeviceWrapper, Error, Graph, KeepAlive, Layout, Op, PlacedGraph,
    Selection, TensorGroup, TensorId, TensorRef, Usage, WrappedDevice,
};
use samite_reference::ReferenceDevice;
use samite_remote::RemoteOptions;
use samite_testing::Counter;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[test]
fn runs_execute_exactly_once_over_broken_connections() {
    let lender = Lender::start(|_| {});
    let proxy = Proxy::start(lender.place());
    let address = proxy.address(&lender.address);
    let device = lender.try_connect(&address, &lender.options()).unwrap();
    let mut counter = Counter::new(&device).unwrap();
    let mut expected = 0.0;
    for round in 0..60usize {
        // Break after this many bytes in either direction, in the middle of any message.
        proxy.left.store(round * 37 % 1500, Ordering::SeqCst);
        for value in [1.0, 2.0, 4.0] {
            expected += value;
            assert_eq!(counter.add(value).unwrap(), expected, "round {round}");
        }
    }
    // Including runs that are not awaited: more than the server keeps replies of.
    for round in 0..10 {
        for _ in 0..40 {
            expected += 1.0;
            counter.run(1.0, &CancelToken::new()).unwrap();
        }
        if round % 2 == 0 {
            proxy.cut();
        }
    }
    assert_eq!(counter.add(0.0).unwrap(), expected);
    assert!(proxy.connections.load(Ordering::SeqCst) > 20);
    assert_eq!(lender.server.sessions(), 1);
    drop((counter, device));
    eventually("the session ends with its client", || {
        lender.server.sessions() == 0
    });
    eventually("its memory is free", || lender.server.memory_in_use() == 0);
}

fn lost(result: Result<f32, Error>, with: &str) {
    match result {
        Err(Error::DeviceLost { device, message }) => {
            assert_eq!(&*device, "remote0");
            assert!(message.contains(with), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn absent_clients_lose_their_session() {
    let lender = Lender::start(|options| options.absence = Duration::from_millis(200));
    let proxy = Proxy::start(lender.place());
    let address = proxy.address(&lender.address);
    let device = lender.try_connect(&address, &lender.options()).unwrap();
    let mut counter = Counter::new(&device).unwrap();
    assert_eq!(counter.add(1.0).unwrap(), 1.0);
    proxy.is_shut.store(true, Ordering::SeqCst);
    proxy.cut();
    eventually("the session is over", || lender.server.sessions() == 0);
    eventually("its memory is free", || lender.server.memory_in_use() == 0);
    proxy.is_shut.store(false, Ordering::SeqCst);
    lost(counter.add(1.0), "no such session");
    // From now on, every call fails without another connection.
    let connections = proxy.connections.load(Ordering::SeqCst);
    lost(counter.add(1.0), "no such session");
    assert!(counter.stream.synchronize().is_err());
    assert_eq!(proxy.connections.load(Ordering::SeqCst), connections);
}

#[test]
fn an_unreachable_server_is_a_lost_device() {
    let lender = Lender::start(|_| {});
    let proxy = Proxy::start(lender.place());
    let mut options = lender.options();
    options.reconnect = Duration::from_millis(300);
    let address = proxy.address(&lender.address);
    let device = lender.try_connect(&address, &options).unwrap();
    let mut counter = Counter::new(&device).unwrap();
    proxy.is_shut.store(true, Ordering::SeqCst);
    proxy.cut();
    let start = Instant::now();
    lost(counter.add(1.0), &proxy.place);
    // Earlier than the default timeout of a minute.
    assert!(start.elapsed() < lender.options().reconnect);
}

#[test]
fn an_unreachable_server_does_not_stall_another() {
    let lenders = [Lender::start(|_| {}), Lender::start(|_| {})];
    let mut counters = lenders
        .each_ref()
        .map(|lender| Counter::new(&lender.connect()).unwrap());
    for counter in &mut counters {
        counter.add(1.0).unwrap();
    }
    // The first server is unreachable for a while, which must not affect the other one.
    let proxy = Proxy::start(lenders[0].place());
    let address = proxy.address(&lenders[0].address);
    let away = lenders[0]
        .try_connect(&address, &lenders[0].options())
        .unwrap();
    let mut away = Counter::new(&away).unwrap();
    proxy.is_shut.store(true, Ordering::SeqCst);
    proxy.cut();
    away.run(5.0, &CancelToken::new()).unwrap();
    // If it waited for the first one, that session would eventually be lost.
    for count in 2..100 {
        assert_eq!(counters[1].add(1.0).unwrap(), count as f32);
    }
    proxy.is_shut.store(false, Ordering::SeqCst);
    assert_eq!(away.add(1.0).unwrap(), 6.0);
}

fn weights(device: &Arc<dyn Device>, pieces: &[(u8, usize)]) -> Result<(), Error> {
    let layouts: Vec<_> = pieces.iter().map(|(_, n)| ("w", floats(*n))).collect();
    let group = TensorGroup::allocate(&device.buffer_type(), Usage::Weights, &layouts)?;
    for ((value, n), tensor) in pieces.iter().zip(&group.tensors) {
        tensor.tensor().write(0, &vec![*value; n * 4])?;
        let mut out = vec![0; n * 4];
        tensor.tensor().read(0, &mut out)?;
        assert!(out.iter().all(|byte| byte == value));
    }
    Ok(())
}

#[test]
fn weights_are_sent_once() {
    let lender = Lender::start(|_| {});
    let pieces = [(1, 100_000), (2, 3_000_000), (3, 500)];
    let sent = |device: &Arc<dyn Device>| {
        let before = lender.server.received();
        weights(device, &pieces).unwrap();
        lender.server.received() - before
    };
    let all = 4 * (100_000 + 3_000_000 + 500);
    let first = sent(&lender.connect());
    // The second tensor has equal chunks, which are also sent only once.
    assert!(first > all / 3, "{first}");
    let second = sent(&lender.connect());
    assert!(second < all / 100, "{second} of {all}");
    // Another token must prove that it has the bytes, without sending more.
    let other = lender.folder.path().join("other");
    let text = std::fs::read_to_string(lender.tokens()).unwrap();
    let token = "00".repeat(32);
    std::fs::write(lender.tokens(), format!("{text}{token}\n")).unwrap();
    std::fs::write(&other, token).unwrap();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&other, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let again = Lender::start(|options| {
        options.tokens = lender.tokens();
        options.store = Some(lender.folder.path().join("store"));
    });
    let mut options = again.options();
    options.token = Some(other);
    let device = again.try_connect(&again.address, &options).unwrap();
    let before = again.server.received();
    weights(&device, &pieces).unwrap();
    let third = again.server.received() - before;
    assert!(third < all / 100, "{third} of {all}");
}

#[test]
fn runs_can_be_cancelled() {
    let lender = Lender::start(|_| {});
    let mut options = lender.options();
    let device = lender.try_connect(&lender.address, &options).unwrap();
    let mut counter = Counter::new(&device).unwrap();
    let cancel = CancelToken::new();
    cancel.cancel();
    assert!(matches!(counter.run(1.0, &cancel), Err(Error::Cancelled)));
    assert_eq!(counter.add(1.0).unwrap(), 1.0);
    // A long run: products of large matrices in scalar code.
    let long = |device: &Arc<dyn Device>, is_cancelled: bool| {
        let layout = Layout::contiguous(samite_core::DType::F32, [700, 700, 1, 1]).unwrap();
        let names = [("a", layout), ("b", layout)];
        let group = TensorGroup::allocate(&device.buffer_type(), Usage::Any, &names)?;
        let mut g = samite_core::Graph::new();
        let a = g.stored(&group.tensors[0])?;
        let b = g.stored(&group.tensors[1])?;
        let mut places: Vec<_> = group
            .tensors
            .iter()
            .map(|t| Some(t.tensor().clone()))
            .collect();
        let mut nodes = Vec::new();
        for _ in 0..40 {
            nodes.push(g.mul_mat(a, b)?);
            let result =
                TensorGroup::allocate(&device.buffer_type(), Usage::Any, &[("c", layout)])?;
            places.push(Some(result.tensors[0].tensor().clone()));
        }
        let mut stream = Arc::clone(device).open_stream()?;
        let mut prepared = stream.prepare(samite_core::PlacedGraph {
            graph: &g,
            nodes: &nodes,
            places: &places,
            workspace: None,
            compiled: None,
        })?;
        let cancel = CancelToken::new();
        let control = samite_core::RunControl {
            cancel: &cancel,
            observer: None,
        };
        if is_cancelled {
            let cancel = cancel.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                cancel.cancel();
            });
        }
        let start = Instant::now();
        stream.run(&mut *prepared, control)?;
        let result = stream.synchronize();
        Ok::<_, Error>((result, start.elapsed()))
    };
    let (result, took) = long(&device, true).unwrap();
    assert!(
        matches!(result, Err(Error::Cancelled)),
        "{result:?} after {took:?}"
    );
    assert_eq!(counter.add(1.0).unwrap(), 2.0, "the session goes on");
    options.deadline = Some(Duration::from_millis(100));
    let device = lender.try_connect(&lender.address, &options).unwrap();
    let (result, took) = long(&device, false).unwrap();
    assert!(
        matches!(result, Err(Error::Cancelled)),
        "{result:?} after {took:?}"
    );
}

#[test]
fn a_disconnected_session_is_evicted_for_the_same_token() {
    let mib = 1 << 20;
    let lender = Lender::start(|options| {
        let text = format!("{}\n{}\n", "11".repeat(32), "22".repeat(32));
        std::fs::write(&options.tokens, text).unwrap();
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let only_mine = std::fs::Permissions::from_mode(0o600);
            std::fs::set_permissions(&options.tokens, only_mine).unwrap();
        }
        options.memory = Some(3 * mib);
        options.sessions = 3;
    });
    // A client whose connection breaks for good, a connected one, and one with another token.
    let proxy = Proxy::start(lender.place());
    let through = proxy.address(&lender.address);
    let killed = lender.try_connect(&through, &lender.options()).unwrap();
    let take = |device: &Arc<dyn Device>| device.buffer_type().allocate(mib, Usage::Any);
    let _of_killed = [take(&killed).unwrap(), take(&killed).unwrap()];
    let living = lender.connect();
    let held = take(&living).unwrap();
    let other_token = lender.folder.path().join("other");
    // The copy keeps the permissions.
    std::fs::copy(lender.tokens(), &other_token).unwrap();
    std::fs::write(&other_token, "22".repeat(32)).unwrap();
    let options = RemoteOptions {
        token: Some(other_token),
        ..RemoteOptions::default()
    };
    let other = lender.try_connect(&lender.address, &options).unwrap();
    assert!(take(&other).is_err());
    proxy.is_shut.store(true, Ordering::SeqCst);
    proxy.cut();
    let free = |device: &Arc<dyn Device>| device.memory().free.unwrap();
    eventually("it counts as free", || free(&living) == 2 * mib);
    // The other token gets none of the memory, and no further session.
    assert_eq!(free(&other), 0);
    assert!(take(&other).is_err());
    assert!(lender.try_connect(&lender.address, &options).is_err());
    assert_eq!(lender.server.sessions(), 3);
    let second = take(&living).unwrap();
    assert_eq!(lender.server.sessions(), 2);
    assert_eq!(lender.server.memory_in_use(), 2 * mib);
    assert!(take(&other).is_ok());
    drop((held, second));
}

/// A device with inexact top-k selection.
struct Unknown(Arc<dyn Device>);

impl DeviceWrapper for Unknown {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.0
    }

    fn selection(&self) -> Selection {
        Selection::Inexact
    }
}

#[test]
fn servers_select_tokens_only_if_their_device_matches_the_sampler() {
    let unknown = WrappedDevice::device(Unknown(ReferenceDevice::new(Default::default())));
    let lender = Lender::with_devices(&[unknown], |_| {});
    assert_eq!(lender.connect().selection(), Selection::Inexact);
}

/// A device that needs scratch memory for each node, wants the second node first, and needs the
/// first result for longer.
struct Wishful(Arc<dyn Device>);

impl DeviceWrapper for Wishful {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.0
    }

    fn workspace(&self, _: &Graph, nodes: &[TensorId]) -> Result<usize, Error> {
        Ok(1024 * nodes.len())
    }

    fn optimize(&self, graph: &Graph, nodes: &mut [TensorId]) -> Vec<KeepAlive> {
        let is_sum = |id: &&TensorId| matches!(graph.tensor(**id).op, Op::Add);
        let Some(&until) = nodes.iter().find(is_sum).filter(|_| nodes.len() > 1) else {
            return Vec::new();
        };
        let tensor = nodes[0];
        nodes.swap(0, 1);
        vec![KeepAlive { tensor, until }]
    }
}

#[test]
fn device_requests_reach_the_client_plan() {
    let wishful = WrappedDevice::device(Wishful(ReferenceDevice::new(Default::default())));
    let lender = Lender::with_devices(&[wishful], |_| {});
    let device = lender.connect();
    assert_eq!(device.selection(), Selection::Wanted);
    let mut g = Graph::new();
    let x = g.input("x", DType::F32, [4, 4, 1, 1]).unwrap();
    let before = g.sqr(x).unwrap();
    let turned = g.transpose(before).unwrap();
    let first = g.cont(turned).unwrap();
    let row = g.rows(first, 1, 2).unwrap();
    let second = g.sqrt(x).unwrap();
    let rows = g.rows(second, 1, 2).unwrap();
    let sum = g.add(row, rows).unwrap();
    g.set_output(sum);
    // Results computed elsewhere become inputs; views are included where they are read.
    let mut nodes = [first, second, row, rows, sum];
    let sizes = device.workspaces(&g, &[&nodes, &[sum], &[row]]).unwrap();
    // The part also includes views that only it uses.
    assert_eq!(sizes, [5 * 1024, 1024, 0]);
    let keeps = device.optimize(&g, &mut nodes);
    assert_eq!(nodes, [second, first, row, rows, sum]);
    let (tensor, until) = (first, sum);
    assert_eq!(keeps, [KeepAlive { tensor, until }]);

    let input = [("x", floats(4)), ("y", floats(4))];
    let group = TensorGroup::allocate(&device.buffer_type(), Usage::Any, &input).unwrap();
    let mut g = Graph::new();
    let x = g.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let y = g.sqr(x).unwrap();
    g.set_output(y);
    let places: Vec<_> = (0..2)
        .map(|i| Some(group.tensors[i].tensor().clone()))
        .collect();
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    let mut prepare = |workspace: Option<&TensorRef>| {
        let placed = PlacedGraph {
            graph: &g,
            nodes: &[y],
            places: &places,
            workspace,
            compiled: None,
        };
        let prepared = stream.prepare(placed);
        (prepared, lender.server.memory_in_use())
    };
    let taken = lender.server.memory_in_use();
    let scratch = |size: usize| {
        let layout = Layout::contiguous(DType::I8, [size, 1, 1, 1]).unwrap();
        let memory = device.buffer_type();
        TensorGroup::allocate(&memory, Usage::Compute, &[("workspace", layout)]).unwrap()
    };
    let enough = scratch(1024);
    let (prepared, now) = prepare(Some(enough.tensors[0].tensor()));
    assert!(prepared.is_ok());
    assert_eq!(now, taken + 1024, "it is the client's memory");
    drop((prepared, enough));
    // A client that provides no scratch memory.
    let (prepared, now) = prepare(None);
    assert!(prepared.is_ok());
    assert_eq!(now, taken + 1024, "the server takes it");
    drop(prepared);
    // A client that provides too little.
    let small = scratch(1023);
    let (prepared, now) = prepare(Some(small.tensors[0].tensor()));
    assert!(prepared.is_ok());
    assert_eq!(now, taken + 1024 + 1023, "the server has enough");
}

#[test]
fn a_device_panic_ends_only_its_session() {
    struct Panics(Arc<dyn Device>);
    impl DeviceWrapper for Panics {
        fn inner(&self) -> &Arc<dyn Device> {
            &self.0
        }
        fn workspace(&self, _: &Graph, _: &[TensorId]) -> Result<usize, Error> {
            panic!("on purpose")
        }
    }
    let panics = WrappedDevice::device(Panics(ReferenceDevice::new(Default::default())));
    let lender = Lender::with_devices(&[panics], |_| {});
    let (device, other) = (lender.connect(), lender.connect());
    let error = Counter::new(&device).err().unwrap();
    assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
    let group = TensorGroup::allocate(&other.buffer_type(), Usage::Any, &[("x", floats(4))]);
    assert!(group.is_ok());
}
