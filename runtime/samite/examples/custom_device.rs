//! A custom device: it scales and adds F32 vectors in host memory and leaves everything else to the
//! CPU.
//!
//! ```sh
//! cargo run --release -p samite --example custom_device
//! ```

use samite::prelude::*;
use samite::{
    BufferType, DeviceKind, Error, Node, Op, PlacedGraph, Prepared, Result, RunControl, Stream,
    Support, TensorRef, host_buffer_type,
};
use std::any::Any;

/// The device. It has no memory of its own and works on tensors in host memory.
#[derive(Debug)]
struct VectorDevice;

impl Device for VectorDevice {
    fn name(&self) -> &str {
        "vector"
    }

    fn description(&self) -> String {
        "scales and adds".into()
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Accelerator
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        host_buffer_type()
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        buffer_type.is_host()
    }

    /// The scheduler calls this for every node and shows the reasons in its explanations.
    fn supports(&self, node: Node<'_>) -> Support {
        let dense = |node: Node<'_>| node.dtype() == DType::F32 && node.layout().is_contiguous();
        let operands = [node.source(0), node.source(1)];
        match node.op() {
            Op::Scale { .. } => {}
            Op::Add if node.source_layout(1).map(|l| l.shape()) == Some(node.layout().shape()) => {}
            Op::Add => return Support::no("it does not repeat operands"),
            _ => return Support::no("it only scales and adds"),
        }
        Support::when(
            operands.into_iter().flatten().all(dense),
            "operands must be dense f32",
        )
    }

    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
        Ok(Box::new(VectorStream(self)))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// One node's operation, with the locations of its operands and result.
enum Step {
    Scale {
        scale: f32,
        bias: f32,
        x: TensorRef,
        to: TensorRef,
    },
    Add {
        a: TensorRef,
        b: TensorRef,
        to: TensorRef,
    },
}

struct Steps(Vec<Step>);

impl Prepared for Steps {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

/// A synchronous stream: every call has completed when it returns, so no call has to wait.
struct VectorStream(Arc<VectorDevice>);

fn load(tensor: &TensorRef) -> Result<Vec<f32>> {
    let mut bytes = vec![0; tensor.layout().bytes()];
    tensor.read(0, &mut bytes)?;
    Ok(f32_values(&bytes))
}

impl Stream for VectorStream {
    fn device(&self) -> &dyn Device {
        &*self.0
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        let mut steps = Vec::new();
        for node in work.computed() {
            let to = work.place(node.id())?.clone();
            let operand = |index: usize| -> Result<TensorRef> {
                let source = node
                    .source(index)
                    .ok_or_else(|| Error::invalid("an operand is missing"))?;
                Ok(work.place(source.id())?.clone())
            };
            steps.push(match *node.op() {
                Op::Scale { scale, bias } => Step::Scale {
                    scale,
                    bias,
                    x: operand(0)?,
                    to,
                },
                Op::Add => Step::Add {
                    a: operand(0)?,
                    b: operand(1)?,
                    to,
                },
                ref op => {
                    return Err(Error::unsupported(
                        "vector",
                        op.name(),
                        "it only scales and adds",
                    ));
                }
            });
        }
        Ok(Box::new(Steps(steps)))
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        let steps = prepared
            .as_any()
            .downcast_ref::<Steps>()
            .ok_or_else(|| Error::invalid("work of another device"))?;
        for step in &steps.0 {
            control.cancel.check()?;
            let (to, values): (_, Vec<f32>) = match step {
                Step::Scale { scale, bias, x, to } => {
                    (to, load(x)?.iter().map(|x| scale * x + bias).collect())
                }
                Step::Add { a, b, to } => (
                    to,
                    load(a)?.iter().zip(load(b)?).map(|(a, b)| a + b).collect(),
                ),
            };
            to.write(0, &f32_bytes(&values))?;
        }
        Ok(())
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }
}

fn main() -> Result<()> {
    let registry = Registry::built_in(Default::default());
    let cpu = Arc::clone(
        registry
            .device("cpu")
            .map_err(|error| Error::invalid(error.to_string()))?,
    );

    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1])?;
    let scaled = graph.scale(x, 3.0)?;
    let root = graph.sqrt(scaled)?; // the vector device cannot do this
    let sum = graph.add(root, x)?;
    graph.set_output(sum);

    // The custom device comes first, so it takes over what it supports from the CPU, on the same
    // memory.
    let mut scheduler = Scheduler::new(vec![Arc::new(VectorDevice), cpu], Default::default())?;
    println!("{}", scheduler.plan(&graph, Assignments::NONE)?);
    scheduler.load(&graph)?;
    scheduler.write(x, 0, &f32_bytes(&[0.0, 3.0, 12.0, 27.0]))?;
    scheduler.run(&CancelToken::new())?;
    let mut bytes = [0; 16];
    scheduler.read(sum, 0, &mut bytes)?;
    assert_eq!(f32_values(&bytes), [0.0, 6.0, 18.0, 36.0]);
    println!("sqrt(3 x) + x = {:?}", f32_values(&bytes));
    Ok(())
}
