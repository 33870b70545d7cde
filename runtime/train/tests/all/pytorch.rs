//! Compares optimizer steps and gradients with PyTorch's numbers, written by
//! `tests/fixtures/pytorch.py`.

use samite_core::op::Unary;
use samite_core::{CancelToken, DType, Device, Graph, TensorId};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_sched::{Options, Scheduler};
use samite_train::{
    Fit, FitOptions, Gradients, Loss, Optimizer, ParameterSpec, Result, Samples, Schedule,
};
use serde_json::Value;
use std::sync::Arc;

fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/pytorch.json")).unwrap()
}

fn number(value: &Value) -> f32 {
    value.as_f64().unwrap() as f32
}

/// Flattens nested lists of numbers.
fn numbers(value: &Value) -> Vec<f32> {
    match value.as_array() {
        Some(parts) => parts.iter().flat_map(numbers).collect(),
        None => vec![number(value)],
    }
}

#[track_caller]
fn near(got: &[f32], expected: &[f32], share: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!(
            (a - b).abs() <= share * b.abs().max(1.0),
            "{what}, element {i}: {got:?} instead of {expected:?}"
        );
    }
}

fn parameter(name: &str, shape: [usize; 2], deviation: Option<f32>) -> ParameterSpec {
    ParameterSpec {
        name: name.into(),
        shape: [shape[0], shape[1], 1, 1],
        deviation,
        layer: None,
    }
}

/// Fits `y = (W x) * g`, with a matrix initialized to zeros and a norm's weights initialized to
/// ones, and compares both after every step.
fn follows(case: &Value, optimizer: Optimizer, rate: f32) {
    let all = fixture();
    let samples = Samples::new(numbers(&all["x"]), 3, numbers(&all["y"]), 2).unwrap();
    let options = FitOptions {
        batch: samples.len(),
        loss: Loss::MeanSquaredError,
        optimizer,
        schedule: Schedule {
            rate,
            last_rate: Some(rate),
            warmup: 0,
        },
        clip: number(&case["clip"]),
        ..FitOptions::default()
    };
    let build = |graph: &mut Graph, x: TensorId, weights: &[TensorId]| -> Result<TensorId> {
        let y = graph.mul_mat(weights[0], x)?;
        Ok(graph.mul(y, weights[1])?)
    };
    let parameters = vec![
        parameter("w", [3, 2], Some(0.0)),
        parameter("g", [2, 1], None),
    ];
    let devices: Vec<Arc<dyn Device>> = vec![CpuDevice::new(CpuOptions::default().with_threads(1))];
    let cancel = CancelToken::new();
    let mut fit = Fit::new(options, [3, 2], parameters, devices, cancel, build).unwrap();
    let steps = case["steps"].as_array().unwrap();
    assert!(steps.len() > 20);
    for (number, step) in steps.iter().enumerate() {
        let report = fit.fit(&samples, 1, 0.0).unwrap()[0];
        let loss = [step["loss"].as_f64().unwrap() as f32];
        near(
            &[report.learnt.loss],
            &loss,
            2e-5,
            &format!("loss of step {number}"),
        );
        for name in ["w", "g"] {
            let what = format!("{name} after step {number}");
            near(&fit.read(name).unwrap(), &numbers(&step[name]), 2e-5, &what);
        }
    }
}

#[test]
fn adamw_steps_match_pytorch() {
    let all = fixture();
    for name in ["adamw", "adamw_unlimited"] {
        let case = &all[name];
        let optimizer = Optimizer::Adamw {
            beta1: number(&case["betas"][0]),
            beta2: number(&case["betas"][1]),
            eps: number(&case["eps"]),
            weight_decay: number(&case["decay"]),
        };
        follows(case, optimizer, number(&all["rate"]));
    }
}

#[test]
fn sgd_with_momentum_steps_match_pytorch() {
    let case = &fixture()["sgd"];
    let optimizer = Optimizer::Sgd {
        momentum: number(&case["momentum"]),
        weight_decay: number(&case["decay"]),
    };
    follows(case, optimizer, number(&case["rate"]));
}

/// Compares the result of `build` and its gradients by the inputs, on the reference device and on
/// the CPU. Inputs are matrices or rows.
fn differentiates(
    name: &str,
    build: impl Fn(&mut Graph, &[TensorId]) -> samite_core::Result<TensorId>,
) {
    let case = &fixture()[name];
    let reference = ReferenceDevice::new(ReferenceOptions::default()) as Arc<dyn Device>;
    let cpu = CpuDevice::new(CpuOptions::default().with_threads(1)) as Arc<dyn Device>;
    for device in [reference, cpu] {
        let what = format!("{name} on {}", device.name());
        let mut graph = Graph::new();
        let mut inputs = Vec::new();
        for value in case["inputs"].as_array().unwrap() {
            let rows = value.as_array().unwrap().len();
            let data = numbers(value);
            let shape = [data.len() / rows, rows, 1, 1];
            let id = graph.input("x", DType::F32, shape).unwrap();
            inputs.push((id, data));
        }
        let ids: Vec<_> = inputs.iter().map(|(id, _)| *id).collect();
        let y = build(&mut graph, &ids).unwrap();
        let shape = graph.tensor(y).layout.shape();
        let elements = shape.iter().product::<usize>();
        let factors = graph.input("factors", DType::F32, shape).unwrap();
        inputs.push((factors, (1..=elements).map(|i| i as f32).collect()));
        let product = graph.mul(y, factors).unwrap();
        let loss = graph.sum(product).unwrap();
        let gradients = Gradients::append(&mut graph, loss, 1.0, &ids).unwrap();
        let outputs: Vec<_> = [y]
            .into_iter()
            .chain(ids.iter().map(|&id| gradients.get(id).unwrap()))
            .map(|id| graph.cont(id).unwrap())
            .collect();
        for &id in &outputs {
            graph.set_output(id);
        }
        let mut scheduler = Scheduler::new(vec![device], Options::default()).unwrap();
        scheduler.load(&graph).unwrap();
        for (id, data) in &inputs {
            let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
            scheduler.write(*id, 0, &bytes).unwrap();
        }
        scheduler.run(&CancelToken::new()).unwrap();
        let mut read = |id: TensorId| -> Vec<f32> {
            let mut data = vec![0; graph.tensor(id).layout.bytes()];
            scheduler.read(id, 0, &mut data).unwrap();
            let values = data.as_chunks().0;
            values.iter().map(|x| f32::from_le_bytes(*x)).collect()
        };
        near(&read(outputs[0]), &numbers(&case["result"]), 1e-5, &what);
        for (number, &id) in outputs[1..].iter().enumerate() {
            let expected = numbers(&case["gradients"][number]);
            let what = format!("gradient {number} of {what}");
            near(&read(id), &expected, 1e-5, &what);
        }
    }
}

#[test]
fn norm_gradients_match_pytorch_around_eps() {
    let eps = |name: &str| number(&fixture()[name]["eps"]);
    let limit = eps("l2_norm");
    differentiates("l2_norm", |g, x| g.l2_norm(x[0], limit));
    let added = eps("rms_norm");
    differentiates("rms_norm", |g, x| g.rms_norm(x[0], added));
}

#[test]
fn function_gradients_match_pytorch_even_at_zero() {
    for (name, function) in [
        ("gelu_erf", Unary::GeluErf),
        ("gelu", Unary::Gelu),
        ("silu", Unary::Silu),
    ] {
        differentiates(name, |g, x| g.unary(x[0], function));
    }
    differentiates("soft_max", |g, x| g.soft_max(x[0], None, None, 0.5, 0.0));
}

#[test]
fn set_rows_gradients_match_pytorch() {
    differentiates("set_rows", |g, x| {
        let rows = g.arange(0.0, 2.0, 1.0)?;
        let rows = g.scale_bias(rows, -2.0, 2.0)?;
        let rows = g.cast(rows, DType::I32)?;
        let before = g.mul(x[1], x[1])?;
        let memory = g.dup(x[1])?;
        let after = g.set_rows(x[0], rows, memory)?;
        let after = g.scale(after, 3.0)?;
        g.add(before, after)
    });
}
