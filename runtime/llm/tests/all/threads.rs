//! Contexts in several operating system threads, on one CPU device and on several.

use super::common::*;
use samite_core::{
    Device, DeviceWrapper, PlacedGraph, Prepared, Result, RunControl, Stream, TensorRef,
    WrappedDevice,
};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_llm::{Context, ContextOptions, Model, SyntheticModel};
use samite_testing::HANG_GUARD;
use std::sync::mpsc;
use std::sync::{Arc, Barrier, Mutex};

/// Creates a model large enough for its products to be shared among the workers of a device.
fn model(architecture: &'static str, seed: u64) -> TestModel {
    TestModel::write(&SyntheticModel {
        n_embd: 256,
        n_ff: 512,
        seed,
        ..SyntheticModel::tiny(architecture)
    })
}

fn device(name: &str) -> Arc<dyn Device> {
    CpuDevice::with_name(name, CpuOptions::default().with_threads(3))
}

fn options() -> ContextOptions {
    ContextOptions {
        n_ctx: Some(128),
        n_ubatch: 24,
        ..ContextOptions::default()
    }
}

/// Decodes a prompt in micro-batches of several sizes, then greedily samples tokens. Returns all
/// logits.
fn write(context: &mut Context, seed: usize) -> Vec<Vec<f32>> {
    let prompt = &tokens(60 + seed)[seed..];
    context.clear().unwrap();
    let mut all = decode(context, prompt, 0, 0);
    for position in prompt.len()..prompt.len() + 12 {
        let last = all.last().unwrap();
        let device_top_k = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b]));
        let token = device_top_k.unwrap() as u32;
        all.extend(decode(context, &[token], position as i32, 0));
    }
    all
}

/// Compares the results of every model in its own context: first in sequence, then concurrently,
/// several times.
fn write_alone_and_together(models: Vec<Arc<Model>>) {
    let alone: Vec<_> = models
        .iter()
        .enumerate()
        .map(|(number, model)| write(&mut context(model, options()), number))
        .collect();
    assert!(alone.windows(2).all(|pair| pair[0] != pair[1]));

    let start = Arc::new(Barrier::new(models.len()));
    let (done, is_done) = mpsc::channel();
    for (number, model) in models.into_iter().enumerate() {
        let (start, done) = (Arc::clone(&start), done.clone());
        let expected = alone[number].clone();
        std::thread::spawn(move || {
            start.wait();
            // Created here, so that memory is allocated and plans are created concurrently as well.
            let mut context = context(&model, options());
            let same = (0..4).all(|_| write(&mut context, number) == expected);
            let _ = done.send((number, same));
        });
    }
    drop(done);
    for _ in 0..alone.len() {
        let (number, same) = is_done
            .recv_timeout(HANG_GUARD)
            .expect("a context panicked, or contexts wait for each other");
        assert!(same, "context {number} writes something else than alone");
    }
}

#[test]
fn concurrent_contexts_of_one_model_decode_as_alone() {
    for architecture in ["llama", "qwen3moe"] {
        let file = model(architecture, 1);
        let model = file.load(vec![device("cpu")], "");
        write_alone_and_together(vec![Arc::clone(&model), Arc::clone(&model), model]);
    }
}

#[test]
fn concurrent_models_on_one_device_decode_as_alone() {
    let (first, second) = (model("llama", 1), model("qwen2", 2));
    let shared = device("cpu");
    write_alone_and_together(vec![
        first.load(vec![Arc::clone(&shared)], ""),
        second.load(vec![shared], ""),
    ]);
}

#[test]
fn concurrent_models_on_separate_devices_decode_as_alone() {
    let (first, second) = (model("llama", 1), model("qwen2", 2));
    write_alone_and_together(vec![
        first.load(vec![device("cpu")], ""),
        second.load(vec![device("cpu")], ""),
    ]);
}

/// Records, for each run, the number of threads that was last set on the stream.
struct Recorder {
    inner: Arc<dyn Device>,
    runs: Arc<Mutex<Vec<Option<usize>>>>,
}

impl DeviceWrapper for Recorder {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    fn open_stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(RecorderStream {
            inner: Arc::clone(&self.inner).open_stream()?,
            threads: None,
            runs: Arc::clone(&self.runs),
        }))
    }
}

struct RecorderStream {
    inner: Box<dyn Stream>,
    threads: Option<usize>,
    runs: Arc<Mutex<Vec<Option<usize>>>>,
}

impl Stream for RecorderStream {
    fn device(&self) -> &dyn Device {
        self.inner.device()
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        self.inner.prepare(work)
    }

    fn set_threads(&mut self, threads: Option<usize>) {
        self.threads = threads;
        self.inner.set_threads(threads);
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        self.runs.lock().unwrap().push(self.threads);
        self.inner.run(prepared, control)
    }

    fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        self.inner.copy(from, to)
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }
}

#[test]
fn prefill_and_decode_use_their_own_thread_counts() {
    let file = model("llama", 1);
    let runs = Arc::new(Mutex::new(Vec::new()));
    let recorder = WrappedDevice::device(Recorder {
        inner: device("cpu"),
        runs: Arc::clone(&runs),
    });
    let model = file.load(vec![recorder], "");
    let mut context = context(&model, options());
    let all = write(&mut context, 0);
    let take = || std::mem::take(&mut *runs.lock().unwrap());
    let count = take().len();
    for (threads, batch) in [
        (Some(1), Some(3)),
        (Some(2), Some(1)),
        (None, Some(2)),
        (Some(1), None),
        (Some(0), Some(100)),
        (None, None),
    ] {
        context.set_threads(threads, batch);
        assert!(write(&mut context, 0) == all, "{threads:?}, {batch:?}");
        assert_eq!(context.options().threads, threads);
        let seen = take();
        assert_eq!(seen.len(), count);
        let mut kinds = seen.clone();
        kinds.dedup();
        let mut wanted = vec![batch, threads];
        wanted.dedup();
        assert_eq!(kinds, wanted, "{seen:?}");
    }
}

#[test]
fn a_thread_count_of_zero_is_an_error() {
    let model = model("llama", 1).load(vec![device("cpu")], "");
    for options in [
        ContextOptions {
            threads: Some(0),
            ..options()
        },
        ContextOptions {
            threads_batch: Some(0),
            ..options()
        },
    ] {
        let error = Context::new(Arc::clone(&model), options).unwrap_err();
        assert!(error.to_string().contains("threads"), "{error}");
    }
}
