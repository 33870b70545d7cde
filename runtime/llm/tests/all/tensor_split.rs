//! Models whose tensors are divided among several devices.

use crate::common::*;
use samite_core::{DType, Device};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_llm::{ContextOptions, Model, ModelOptions, SyntheticModel};
use samite_meta::{MetaDevice, MetaOptions};
use std::sync::Arc;

fn cpus(count: usize) -> Vec<Arc<dyn Device>> {
    let name = |i| format!("cpu{i}");
    (0..count)
        .map(|i| CpuDevice::with_name(&name(i), CpuOptions::default().with_threads(1)) as _)
        .collect()
}

fn meta(members: Vec<Arc<dyn Device>>, ratios: Option<&[usize]>) -> Arc<MetaDevice> {
    let ratios = ratios.map(|ratios| ratios.iter().map(|&ratio| ratio as f32).collect());
    let options = MetaOptions {
        ratios,
        ..MetaOptions::default()
    };
    MetaDevice::new(members, options).unwrap()
}

/// Every way to give `units` units to `members` members.
fn compositions(units: usize, members: usize) -> Vec<Vec<usize>> {
    if members == 1 {
        return vec![vec![units]];
    }
    let mut all = Vec::new();
    for first in 0..=units {
        for mut rest in compositions(units - first, members - 1) {
            rest.insert(0, first);
            all.push(rest);
        }
    }
    all
}

fn load(file: &TestModel, devices: Vec<Arc<dyn Device>>) -> Arc<Model> {
    Model::load(&file.path, &ModelOptions::new(devices)).unwrap()
}

/// A prompt, then some steps.
fn logits(model: &Arc<Model>, options: ContextOptions) -> Vec<Vec<f32>> {
    let mut context = context(model, options);
    let mut logits = decode(&mut context, &tokens(9), 0, 0);
    for (i, token) in tokens(3).into_iter().enumerate() {
        logits.extend(decode(&mut context, &[token], 9 + i as i32, 0));
    }
    logits
}

#[test]
fn one_member_computes_the_same_bits_as_the_device_alone() {
    for architecture in ARCHITECTURES {
        let file = TestModel::tiny(architecture);
        let alone = logits(&load(&file, cpus(1)), precise());
        let divided = logits(&load(&file, vec![meta(cpus(1), None)]), precise());
        assert_eq!(divided, alone, "{architecture}");
    }
}

#[test]
fn two_members_agree_with_one_device() {
    for architecture in ARCHITECTURES {
        let file = TestModel::tiny(architecture);
        let alone = logits(&load(&file, cpus(1)), precise());
        let device = meta(cpus(2), None);
        let divided = logits(&load(&file, vec![device]), precise());
        let error = nmse(&divided, &alone);
        assert!(error <= 1e-9, "{architecture}: {error:e}");
    }
}
