//! Plans on paper devices, with times that are worked out by hand.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use samite_core::{
    Cut, DType, Device, Graph, Layout, StoredTensor, TensorInfo, Usage, unallocated,
};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_forecast::{Cluster, Task, forecast, plan_only};
use samite_meta::{MetaDevice, MetaOptions};
use samite_sched::{Assignments, DeviceSet, Options, Plan};
use std::sync::Arc;

/// Reading a matrix of 256 by 256 numbers takes a second, everything else nothing.
const DEVICE: &str = "
[devices.d]
memory = 1e9
results = 1e30
attention = 1e30
operation = 0
[devices.d.types.f32]
read = 262144
products = 1e30
[host]
device = 'd'
";

fn cluster(rest: &str) -> Cluster {
    Cluster::parse("test.toml", &format!("{DEVICE}{rest}")).unwrap()
}

fn far(through: &str, count: usize) -> Cluster {
    cluster(&format!(
        "[links.lan]
        latency = 10
        bandwidth = 1e30
        message = 0.25
        [[machines]]
        name = 'node'
        device = 'd'
        count = {count}
        through = '{through}'
        link = 'lan'
        "
    ))
}

fn like() -> Arc<dyn Device> {
    CpuDevice::with_name("like", CpuOptions::default().with_threads(1))
}

fn devices(cluster: &Cluster) -> Vec<Arc<dyn Device>> {
    let like = like();
    let members = cluster.members.iter().map(|member| {
        let through = member.reached.as_ref().map(|(through, _)| *through);
        plan_only(&like, &member.name, member.device.memory, through)
    });
    members
        .chain([plan_only(&like, "cpu", cluster.host.memory, None)])
        .collect()
}

fn weight(device: &Arc<dyn Device>, cut: Option<Cut>) -> Arc<StoredTensor> {
    let layout = Layout::contiguous(DType::F32, [256, 256, 1, 1]).unwrap();
    let info = TensorInfo {
        cut,
        ..TensorInfo::new("w", layout, Usage::Weights)
    };
    let memory = device.buffer_type();
    let buffer = unallocated(&memory, memory.alloc_size(&info).unwrap(), Usage::Weights);
    StoredTensor::described(&info, buffer, 0).unwrap()
}

/// Returns a product with a matrix of each device, one after the other.
fn chain(devices: &[Arc<dyn Device>], tokens: usize, copies: usize) -> Plan {
    let mut graph = Graph::new();
    let mut x = graph.input("x", DType::F32, [256, tokens, 1, 1]).unwrap();
    for device in &devices[..devices.len() - 1] {
        let w = graph.stored(&weight(device, None)).unwrap();
        x = graph.mul_mat(w, x).unwrap();
    }
    graph.set_output(x);
    let set = DeviceSet::new(devices.to_vec()).unwrap();
    let options = Options {
        copies,
        ..Options::default()
    };
    Plan::new(&graph, &set, Assignments::NONE, &options).unwrap()
}

fn generation(cluster: &Cluster, plan: &Plan) -> f64 {
    let task = Task {
        prompt: Vec::new(),
        generation: Some((plan, 2)),
    };
    forecast(cluster, &task)
        .unwrap()
        .generation
        .unwrap()
        .seconds
        / 2.0
}

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-6, "{found} for {expected}");
}

#[test]
fn a_remote_step_takes_one_message_each_way() {
    let cluster = far("remote", 1);
    let plan = chain(&devices(&cluster), 1, 1);
    // Two messages of two ends each, and a second of reading.
    close(generation(&cluster, &plan), 2.0 * (10.0 + 0.5) + 1.0);
}

#[test]
fn rpc_sends_one_message_per_request() {
    let cluster = far("rpc", 1);
    let plan = chain(&devices(&cluster), 1, 1);
    // The input, the run, and the question for the result follow each other: the program is busy
    // with each for a while, the machine takes the second and third while the first one is done,
    // then computes. The question waits after the run's second.
    let last_of_run = 10.0 + 0.25 * 3.0;
    let answer = 10.0 + 0.5;
    let found = generation(&cluster, &plan);
    close(found, last_of_run + 1.0 + 0.25 + answer);
}

#[test]
fn remote_machines_run_one_after_another() {
    let cluster = far("remote", 3);
    let plan = chain(&devices(&cluster), 1, 1);
    close(generation(&cluster, &plan), 3.0 * (2.0 * 10.5 + 1.0));
}

#[test]
fn micro_batches_of_one_plan_overlap() {
    let cluster = cluster(
        "[links.cable]
        latency = 0
        bandwidth = 1e30
        [[machines]]
        name = 'node'
        device = 'd'
        count = 2
        through = 'remote'
        link = 'cable'
        ",
    );
    let plans = [4, 4].map(|tokens| chain(&devices(&cluster), tokens, 4));
    let prompt = |numbers: [usize; 5]| {
        let task = Task {
            prompt: numbers.map(|number| (&plans[number], 4)).to_vec(),
            generation: None,
        };
        let prompt = forecast(&cluster, &task).unwrap().prompt.unwrap();
        assert_eq!(prompt.tokens, 20);
        prompt
    };
    // Each of two stages takes a second for each of five.
    let overlapped = prompt([0; 5]);
    close(overlapped.seconds, 6.0);
    close(overlapped.machines[1].compute, 5.0);
    close(overlapped.machines[1].waiting, 1.0);
    // The scheduler waits before it takes another plan.
    close(prompt([0, 1, 0, 1, 0]).seconds, 10.0);
}

#[test]
fn transfers_take_link_time() {
    let slow = far("remote", 1);
    let text = |bandwidth: f64| {
        let mut cluster = slow.clone();
        let (through, link) = cluster.members[0].reached.clone().unwrap();
        let mut link = (*link).clone();
        link.bandwidth = bandwidth;
        cluster.members[0].reached = Some((through, Arc::new(link)));
        cluster
    };
    let plan = chain(&devices(&slow), 4, 1);
    let quick = generation(&slow, &plan);
    // 4096 bytes and a header there and back.
    close(generation(&text(4160.0), &plan) - quick, 2.0);
}

#[test]
fn split_tensors_are_read_as_shards_and_summed() {
    let text = |algorithm: &str, count: usize| {
        cluster(&format!(
            "[links.lan]
            latency = 10
            bandwidth = 1024
            [[machines]]
            name = 'node'
            device = 'd'
            count = {count}
            [exchange]
            link = 'lan'
            algorithm = '{algorithm}'
            "
        ))
    };
    for (algorithm, count, expected) in [
        // Columns of a quarter of the matrix each; then 1,024 bytes to each of three others.
        ("direct", 4, 0.25 + 10.0 + 3.0),
        ("ring", 4, 0.25 + 6.0 * (10.0 + 0.25)),
        ("doubling", 4, 0.25 + 2.0 * (10.0 + 1.0)),
        ("direct", 2, 0.5 + 10.0 + 1.0),
    ] {
        let cluster = text(algorithm, count);
        let mut members = devices(&cluster);
        let host = members.pop().unwrap();
        let meta = MetaDevice::new(members, MetaOptions::default()).unwrap();
        let meta: Arc<dyn Device> = meta;
        let mut graph = Graph::new();
        let x = graph.input("x", DType::F32, [256, 1, 1, 1]).unwrap();
        let cut = Cut::new(0, 64, 0);
        let w = graph.stored(&weight(&meta, Some(cut))).unwrap();
        let y = graph.mul_mat(w, x).unwrap();
        graph.set_output(y);
        let set = DeviceSet::new(vec![meta, host]).unwrap();
        let plan = Plan::new(&graph, &set, Assignments::NONE, &Options::default()).unwrap();
        close(generation(&cluster, &plan), expected);
        let mut without = cluster.clone();
        without.exchange = None;
        let task = Task {
            prompt: Vec::new(),
            generation: Some((&plan, 1)),
        };
        let error = forecast(&without, &task).unwrap_err().to_string();
        assert!(error.contains("add [exchange]"), "{error}");
    }
}

#[test]
fn devices_missing_from_the_cluster_file_are_named() {
    let cluster = far("remote", 1);
    let mut other = cluster.clone();
    other.members[0].name = "other".to_owned();
    let plan = chain(&devices(&cluster), 1, 1);
    let task = Task {
        prompt: Vec::new(),
        generation: Some((&plan, 1)),
    };
    let error = forecast(&other, &task).unwrap_err().to_string();
    assert!(error.contains("device 'node' is none"), "{error}");
}
