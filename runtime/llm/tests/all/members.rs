//! Members of a divided device that fail, are cancelled, or have limited memory.

use crate::common::*;
use samite_core::{
    Buffer, BufferType, CancelToken, DType, Device, DeviceWrapper, Error as CoreError, Node,
    PlacedGraph, Prepared, Result, RunControl, Stream, Support, TensorInfo, Usage, WrappedDevice,
};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_llm::{
    Batch, Context, ContextOptions, ContextPlan, Error, Model, ModelOptions, SyntheticModel,
};
use samite_meta::{MetaDevice, MetaOptions};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

fn cpu_named(name: &str) -> Arc<dyn Device> {
    CpuDevice::with_name(name, CpuOptions::default().with_threads(1))
}

fn divided(members: Vec<Arc<dyn Device>>) -> Vec<Arc<dyn Device>> {
    vec![
        MetaDevice::new(members, MetaOptions::default()).unwrap(),
        cpu(),
    ]
}

/// Event in a run of a member.
#[derive(Clone)]
enum Event {
    Fails,
    Cancels(CancelToken),
}

/// The event and the run before which it happens; it happens once.
type Fault = Arc<Mutex<Option<(usize, Event)>>>;

struct Faulty {
    inner: Arc<dyn Device>,
    fault: Fault,
}

impl DeviceWrapper for Faulty {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    fn open_stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(FaultyStream {
            inner: Arc::clone(&self.inner).open_stream()?,
            fault: Arc::clone(&self.fault),
        }))
    }
}

struct FaultyStream {
    inner: Box<dyn Stream>,
    fault: Fault,
}

impl Stream for FaultyStream {
    fn device(&self) -> &dyn Device {
        self.inner.device()
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        self.inner.prepare(work)
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        let mut fault = self.fault.lock().unwrap();
        let event = match fault.take() {
            Some((0, event)) => Some(event),
            Some((runs, event)) => {
                *fault = Some((runs - 1, event));
                None
            }
            None => None,
        };
        drop(fault);
        match event {
            Some(Event::Fails) => Err(CoreError::device("cpu1", "it breaks")),
            Some(Event::Cancels(token)) => {
                token.cancel();
                self.inner.run(prepared, control)
            }
            None => self.inner.run(prepared, control),
        }
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }
}

/// Decodes a prompt and steps, with `event` before each run of a member in turn. The error must be
/// of the right kind, and the same decode afterwards must have undisturbed results.
fn disturbed(event: impl Fn(&CancelToken) -> Event, is_right: impl Fn(&Error) -> bool) {
    let file = TestModel::write(&SyntheticModel::tiny("llama"));
    let fault = Fault::default();
    let faulty = WrappedDevice::device(Faulty {
        inner: cpu_named("cpu1"),
        fault: Arc::clone(&fault),
    });
    let model = Model::load(
        &file.path,
        &ModelOptions::new(divided(vec![cpu_named("cpu0"), faulty])),
    )
    .unwrap();
    let cancel = CancelToken::new();
    let options = || ContextOptions {
        cancel: cancel.clone(),
        ..precise()
    };
    let twice = |context: &mut Context| {
        let mut logits = decode(context, &tokens(9), 0, 0);
        logits.extend(decode(context, &[5], 9, 0));
        logits
    };
    let expected = twice(&mut context(&model, options()));
    let mut struck = 0;
    for runs in 0..200 {
        let mut context = context(&model, options());
        *fault.lock().unwrap() = Some((runs, event(&cancel)));
        let prompt = Batch::sequence(&tokens(9), 0, 0);
        let first = context.decode(&prompt);
        let result = first.and_then(|()| context.decode(&Batch::sequence(&[5], 9, 0)));
        let has_struck = fault.lock().unwrap().take().is_none();
        cancel.reset();
        if !has_struck {
            result.unwrap();
            assert!(struck > 4, "{struck} runs");
            return;
        }
        struck += 1;
        // A cancellation in the last piece may come too late.
        if let Err(error) = result {
            assert!(is_right(&error), "run {runs}: {error}");
        }
        context.kv_cache_mut().remove(0, 0..).unwrap();
        // Removed tokens may leave other cells free, in which sums have another order.
        let error = nmse(&twice(&mut context), &expected);
        assert!(error <= 1e-9, "after run {runs}: {error:e}");
    }
    panic!("no end after {struck} runs");
}

#[test]
fn a_failed_member_is_named_and_the_context_stays_usable() {
    disturbed(
        |_| Event::Fails,
        |error| error.to_string().contains("cpu1") && error.to_string().contains("it breaks"),
    );
}

#[test]
fn cancelling_a_run_leaves_the_context_usable() {
    disturbed(
        |token| Event::Cancels(token.clone()),
        |error| matches!(error, Error::Core(CoreError::Cancelled)),
    );
}

/// Memory whose allocations are counted.
#[derive(Debug)]
struct Counting {
    inner: Arc<dyn BufferType>,
    bytes: Arc<AtomicUsize>,
}

impl BufferType for Counting {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn alignment(&self) -> usize {
        self.inner.alignment()
    }

    fn max_size(&self) -> usize {
        self.inner.max_size()
    }

    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        self.inner.alloc_size(tensor)
    }

    fn is_host(&self) -> bool {
        self.inner.is_host()
    }

    fn accepts(&self, node: Node<'_>) -> Support {
        self.inner.accepts(node)
    }

    fn row_group(&self) -> Option<usize> {
        self.inner.row_group()
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        self.bytes.fetch_add(size, Ordering::Relaxed);
        self.inner.allocate(size, usage)
    }
}

struct Counted {
    inner: Arc<dyn Device>,
    bytes: Arc<AtomicUsize>,
}

impl Counted {
    fn counting(&self, inner: Arc<dyn BufferType>) -> Arc<dyn BufferType> {
        Arc::new(Counting {
            inner,
            bytes: Arc::clone(&self.bytes),
        })
    }
}

impl DeviceWrapper for Counted {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        self.counting(self.inner.buffer_type())
    }

    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>> {
        let extra = self.inner.extra_buffer_types().into_iter();
        extra.map(|memory| self.counting(memory)).collect()
    }
}

#[test]
fn each_member_allocates_the_planned_memory() {
    for (architecture, dtype, ratios) in [
        ("llama", DType::F32, vec![1.0, 1.0]),
        ("llama", DType::Q8_0, vec![3.0, 1.0]),
        ("qwen3", DType::Q4_0, vec![1.0, 2.0, 1.0]),
        ("gemma3", DType::F16, vec![1.0, 1.0]),
        ("qwen3moe", DType::Q8_0, vec![1.0, 0.0, 1.0]),
    ] {
        let file = TestModel::write(&SyntheticModel {
            dtype,
            n_embd: 256,
            n_ff: 512,
            n_head: 8,
            n_head_kv: 4,
            ..SyntheticModel::tiny(architecture)
        });
        let counts: Vec<Arc<AtomicUsize>> = ratios.iter().map(|_| Arc::default()).collect();
        let members = counts.iter().enumerate().map(|(number, bytes)| {
            WrappedDevice::device(Counted {
                inner: cpu_named(&format!("cpu{number}")),
                bytes: Arc::clone(bytes),
            })
        });
        let options = MetaOptions {
            ratios: Some(ratios.clone()),
            ..MetaOptions::default()
        };
        let meta = MetaDevice::new(members.collect(), options).unwrap();
        let devices: Vec<Arc<dyn Device>> = vec![meta, cpu()];
        let model = Model::load(&file.path, &ModelOptions::new(devices)).unwrap();
        let plan = ContextPlan::new(Arc::clone(&model), precise()).unwrap();
        let planned = plan.memory().unwrap();
        let mut context = context(&model, precise());
        decode(&mut context, &tokens(9), 0, 0);
        decode(&mut context, &[5], 9, 0);
        for (number, bytes) in counts.iter().enumerate() {
            let name = format!("cpu{number}");
            let row = planned.iter().find(|row| row.memory == name);
            let expected = row.map_or(0, |row| row.weights + row.kv + row.compute) as f64;
            let taken = bytes.load(Ordering::Relaxed) as f64;
            assert!(
                (taken - expected).abs() <= 0.01 * expected,
                "{architecture} {dtype} {ratios:?}: {name} takes {taken}, planned are {expected}"
            );
        }
    }
}
