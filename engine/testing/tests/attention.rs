//! Attention and softmax with sinks, soft caps and ALiBi, compared with results of the formulas
//! from `fixtures/attention.py`: the suite alone would not detect errors of the reference.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod subject;

use samite_core::{DType, Op, Precision};
use samite_testing::nmse;
use serde_json::Value;
use subject::{Subject, devices, numbers};

fn size(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn float(value: &Value) -> f32 {
    value.as_f64().unwrap() as f32
}

#[track_caller]
fn close(subject: &Subject, case: &Value, limit: f64, what: &str) {
    let expected = numbers(&case["result"]);
    for device in devices() {
        let error = nmse(&subject.run(&device), &expected);
        let name = device.name();
        assert!(error <= limit, "{what} on {name}: NMSE {error:e}");
    }
}

fn fixture(name: &str) -> Vec<Value> {
    let all: Value = serde_json::from_str(include_str!("fixtures/attention.json")).unwrap();
    all[name].as_array().unwrap().clone()
}

#[test]
fn attention_with_sinks_soft_caps_and_alibi() {
    for (number, case) in fixture("attention").iter().enumerate() {
        // Keys and values are exact in all types; devices may round intermediate results to them.
        for (dtype, limit) in [(DType::F32, 1e-9), (DType::F16, 1e-6), (DType::BF16, 5e-5)] {
            let mut subject = Subject::default();
            let [heads, kv_heads] = [0, 1].map(|i| size(&case["heads"][i]));
            let [tokens, keys, n] = ["tokens", "keys", "size"].map(|key| size(&case[key]));
            let q = subject.input(DType::F32, [n, tokens, heads, 1], &case["q"]);
            let k = subject.input(dtype, [n, keys, kv_heads, 1], &case["k"]);
            let v = subject.input(dtype, [n, keys, kv_heads, 1], &case["v"]);
            let mask = subject.input(DType::F16, [keys, tokens, 1, 1], &case["mask"]);
            let sinks = subject.input(DType::F32, [heads, 1, 1, 1], &case["sinks"]);
            let op = Op::FlashAttn {
                scale: float(&case["scale"]),
                max_bias: float(&case["max_bias"]),
                softcap: float(&case["softcap"]),
                precision: Precision::F32,
            };
            subject.graph.push(op, &[q, k, v, mask, sinks]).unwrap();
            close(&subject, case, limit, &format!("case {number}, {dtype}"));
        }
    }
}

#[test]
fn soft_max_with_sinks_and_alibi() {
    for (number, case) in fixture("soft_max").iter().enumerate() {
        for mask in [DType::F32, DType::F16] {
            let mut subject = Subject::default();
            let [heads, rows, keys] = ["heads", "rows", "keys"].map(|key| size(&case[key]));
            let x = subject.input(DType::F32, [keys, rows, heads, 1], &case["x"]);
            let mask = subject.input(mask, [keys, rows, 1, 1], &case["mask"]);
            let sinks = subject.input(DType::F32, [heads, 1, 1, 1], &case["sinks"]);
            let op = Op::SoftMax {
                scale: float(&case["scale"]),
                max_bias: float(&case["max_bias"]),
            };
            subject.graph.push(op, &[x, mask, sinks]).unwrap();
            close(&subject, case, 1e-11, &format!("case {number}"));
        }
    }
}
