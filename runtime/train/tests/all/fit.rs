//! Fitting graphs to data: a line, and a function that is not linear.

use samite_core::{CancelToken, Device, Graph, TensorId, Unary};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_train::{
    Error, Fit, FitOptions, Loss, Optimizer, ParameterSpec, Result, Samples, Schedule,
};
use std::sync::Arc;

fn devices() -> Vec<Arc<dyn Device>> {
    vec![CpuDevice::new(CpuOptions::default().with_threads(1))]
}

fn parameter(name: &str, shape: [usize; 2], deviation: f32) -> ParameterSpec {
    ParameterSpec {
        name: name.into(),
        shape: [shape[0], shape[1], 1, 1],
        deviation: Some(deviation),
        layer: None,
    }
}

fn rate(rate: f32, last_rate: f32) -> Schedule {
    Schedule {
        rate,
        last_rate: Some(last_rate),
        warmup: 0,
    }
}

/// Returns samples of `y = 3 x - 2`, with noise independent of `x`.
fn line() -> Samples {
    let xs: Vec<f32> = (0..64).map(|i| i as f32 / 32.0 - 1.0).collect();
    let noise = |i: usize| 0.1 * if i.is_multiple_of(2) { 1.0 } else { -1.0 };
    let ys = xs
        .iter()
        .enumerate()
        .map(|(i, x)| 3.0 * x - 2.0 + noise(i))
        .collect();
    Samples::new(xs, 1, ys, 1).unwrap()
}

fn linear(options: FitOptions) -> Fit {
    let parameters = vec![
        parameter("slope", [1, 1], 0.0),
        parameter("shift", [1, 1], 0.0),
    ];
    let build = |graph: &mut Graph, x: TensorId, weights: &[TensorId]| -> Result<TensorId> {
        let y = graph.mul_mat(weights[0], x)?;
        Ok(graph.add(y, weights[1])?)
    };
    Fit::new(
        options,
        [1, 1],
        parameters,
        devices(),
        CancelToken::new(),
        build,
    )
    .unwrap()
}

#[test]
fn fitting_recovers_a_line() {
    let options = FitOptions {
        batch: 8,
        optimizer: Optimizer::Sgd {
            momentum: 0.5,
            weight_decay: 0.0,
        },
        schedule: rate(0.2, 0.01),
        ..FitOptions::default()
    };
    let mut fit = linear(options);
    let reports = fit.fit(&line(), 20, 0.25).unwrap();
    assert_eq!(reports.len(), 20);
    let (first, last) = (reports[0].learnt, reports[19]);
    assert!(first.loss > 0.5 && first.error > 0.0, "{first:?}");
    // Only the noise remains, in held-back data as well.
    let held_back = last.held_back.unwrap();
    for loss in [last.learnt.loss, held_back.loss] {
        assert!((0.008..0.014).contains(&loss), "{last:?}");
    }
    let (slope, shift) = (fit.read("slope").unwrap()[0], fit.read("shift").unwrap()[0]);
    assert!(
        (slope - 3.0).abs() < 0.05 && (shift + 2.0).abs() < 0.05,
        "{slope} {shift}"
    );
    let again = linear(options).fit(&line(), 20, 0.25).unwrap();
    assert_eq!(again, reports);
}

#[test]
fn fitting_learns_exclusive_or() {
    let inputs = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]].concat();
    let labels = [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]].concat();
    let samples = Samples::new(inputs, 2, labels.clone(), 2).unwrap();
    let parameters = vec![
        parameter("in", [2, 8], 1.0),
        parameter("in bias", [8, 1], 0.1),
        parameter("out", [8, 2], 0.5),
    ];
    let options = FitOptions {
        batch: 4,
        loss: Loss::CrossEntropy,
        schedule: rate(0.05, 0.01),
        seed: 1,
        ..FitOptions::default()
    };
    let build = |graph: &mut Graph, x: TensorId, weights: &[TensorId]| -> Result<TensorId> {
        let inner = graph.mul_mat(weights[0], x)?;
        let inner = graph.add(inner, weights[1])?;
        let inner = graph.unary(inner, Unary::Tanh)?;
        Ok(graph.mul_mat(weights[2], inner)?)
    };
    let lens = [2, 2];
    let mut fit = Fit::new(
        options,
        lens,
        parameters,
        devices(),
        CancelToken::new(),
        build,
    )
    .unwrap();
    let reports = fit.fit(&samples, 200, 0.0).unwrap();
    assert!(reports[199].learnt.loss < 0.05, "{:?}", reports[199]);
    assert!(reports[199].held_back.is_none());
    assert_eq!(fit.evaluate(&samples, 0..4).unwrap().error, 0.0);
    let outputs = fit.predict(&samples, 0..4).unwrap();
    for (output, label) in outputs.chunks(2).zip(labels.chunks(2)) {
        assert_eq!(output[1] > output[0], label[1] > label[0], "{outputs:?}");
    }
}

#[test]
fn without_labels_outputs_are_minimized() {
    for (loss, factor) in [(Loss::Sum, 3.0), (Loss::Mean, 1.0)] {
        let options = FitOptions {
            batch: 3,
            loss,
            optimizer: Optimizer::Sgd {
                momentum: 0.0,
                weight_decay: 0.0,
            },
            schedule: rate(0.25, 0.25),
            ..FitOptions::default()
        };
        // (x + w)², whose gradient by w is 2 (x + w).
        let build = |graph: &mut Graph, x: TensorId, weights: &[TensorId]| -> Result<TensorId> {
            let sum = graph.add(x, weights[0])?;
            Ok(graph.sqr(sum)?)
        };
        let parameters = vec![parameter("w", [1, 1], 0.0)];
        let device = devices();
        let cancel = CancelToken::new();
        let mut fit = Fit::new(options, [1, 0], parameters, device, cancel, build).unwrap();
        let samples = Samples::new(vec![1.0, 2.0, 3.0], 1, Vec::new(), 0).unwrap();
        let report = fit.fit(&samples, 1, 0.0).unwrap()[0];
        assert!(
            (report.learnt.loss - factor * 14.0 / 3.0).abs() < 1e-5,
            "{report:?}"
        );
        let w = fit.read("w").unwrap()[0];
        assert!((w + 0.25 * factor * 4.0).abs() < 1e-5, "{w}");
    }
}

#[test]
fn invalid_sizes_are_refused() {
    let message = |error: Error| error.to_string();
    for (inputs, input_len, labels, label_len, part) in [
        (0, 1, 0, 0, "0 numbers are no inputs"),
        (3, 2, 0, 0, "3 numbers are no inputs of 2"),
        (3, 0, 0, 0, "3 numbers are no inputs of 0"),
        (4, 2, 3, 2, "3 numbers are not a label"),
        (4, 2, 1, 0, "1 numbers are not a label"),
    ] {
        let error = Samples::new(vec![0.0; inputs], input_len, vec![0.0; labels], label_len);
        let error = message(error.unwrap_err());
        assert!(error.contains(part), "{error}");
    }
    let options = FitOptions {
        batch: 8,
        ..FitOptions::default()
    };
    let mut fit = linear(options);
    let few = Samples::new(vec![0.0; 7], 1, vec![0.0; 7], 1).unwrap();
    assert!(message(fit.fit(&few, 1, 0.0).unwrap_err()).contains("no batch of 8"));
    assert!(message(fit.fit(&line(), 1, 0.05).unwrap_err()).contains("no batch of 8"));
    assert!(message(fit.fit(&line(), 1, 1.0).unwrap_err()).contains("share of 1"));
    assert!(message(fit.evaluate(&line(), 60..70).unwrap_err()).contains("samples 60..70 of 64"));
    assert!(message(fit.predict(&line(), 0..9).unwrap_err()).contains("9 samples"));
    let wide = Samples::new(vec![0.0; 16], 2, vec![0.0; 8], 1).unwrap();
    assert!(message(fit.fit(&wide, 1, 0.0).unwrap_err()).contains("[2, 1]"));
    assert!(message(fit.read("nothing").unwrap_err()).contains("'nothing'"));

    let wild = FitOptions {
        schedule: rate(1e30, 1e30),
        optimizer: Optimizer::Sgd {
            momentum: 0.0,
            weight_decay: 0.0,
        },
        ..options
    };
    let error = linear(wild).fit(&line(), 3, 0.0).unwrap_err();
    assert!(matches!(error, Error::Diverged { .. }), "{error}");

    let two = |options| {
        let build = |graph: &mut Graph, x: TensorId, weights: &[TensorId]| -> Result<TensorId> {
            Ok(graph.mul_mat(weights[0], x)?)
        };
        let parameters = vec![parameter("w", [1, 2], 1.0)];
        message(
            Fit::new(
                options,
                [1, 1],
                parameters,
                devices(),
                CancelToken::new(),
                build,
            )
            .unwrap_err(),
        )
    };
    assert!(two(options).contains("labels have the shape [1, 8, 1, 1]"));
    assert!(
        two(FitOptions {
            batch: 0,
            ..options
        })
        .contains("no samples")
    );
    let mut graph = Graph::new();
    let x = graph
        .input("x", samite_core::DType::F32, [1, 1, 1, 1])
        .unwrap();
    for (loss, labels) in [(Loss::Mean, Some(x)), (Loss::MeanSquaredError, None)] {
        let error = message(loss.append(&mut graph, x, labels).unwrap_err());
        assert!(error.contains("labels"), "{error}");
    }
}
