//! Builds a small network, spreads it over two devices with separate memory, and explains the plan.
//!
//! ```sh
//! cargo run --release -p samite --example two_devices
//! ```

use samite::prelude::*;
use samite_reference::{ReferenceDevice, ReferenceOptions};

fn main() -> samite::Result<()> {
    // Like a GPU, the reference device has memory that the host cannot access: data has to be
    // copied across.
    let far: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions::default());
    let registry = Registry::built_in(Default::default());
    let cpu = Arc::clone(
        registry
            .device("cpu")
            .map_err(|error| samite::Error::invalid(error.to_string()))?,
    );

    // Weights decide where work runs: the first layer's are on one device, the second's on the
    // other.
    let matrix = samite::Layout::contiguous(DType::F32, [64, 64, 1, 1])?;
    let first = TensorGroup::allocate(
        &far.buffer_type(),
        Usage::Weights,
        &[("first.weight", matrix)],
    )?;
    let second = TensorGroup::allocate(
        &cpu.buffer_type(),
        Usage::Weights,
        &[("second.weight", matrix)],
    )?;
    let ramp: Vec<f32> = (0..64 * 64)
        .map(|i| (i % 13) as f32 / 64.0 - 0.09)
        .collect();
    for group in [&first, &second] {
        group.tensors[0].tensor().write(0, &f32_bytes(&ramp))?;
    }

    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [64, 3, 1, 1])?;
    let mut hidden = x;
    for weights in [&first.tensors[0], &second.tensors[0]] {
        let weights = graph.stored(weights)?;
        let normed = graph.rms_norm(hidden, 1e-5)?;
        let product = graph.mul_mat(weights, normed)?;
        let active = graph.unary(product, samite::Unary::Silu)?;
        hidden = graph.add(active, hidden)?;
    }
    graph.set_name(hidden, "result");
    graph.set_output(hidden);

    let mut scheduler = Scheduler::new(vec![far, cpu], Default::default())?;
    println!("{}", scheduler.plan(&graph, Assignments::NONE)?);

    scheduler.load(&graph)?;
    scheduler.write(x, 0, &f32_bytes(&vec![0.5; 64 * 3]))?;
    scheduler.run(&CancelToken::new())?;
    let mut bytes = vec![0; 64 * 3 * 4];
    scheduler.read(hidden, 0, &mut bytes)?;
    println!("first results: {:?}", &f32_values(&bytes)[..4]);
    Ok(())
}
