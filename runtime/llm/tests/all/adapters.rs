//! Adapters: applied, changed while a context runs, merged, and rejected. `llama_cpp.rs` compares
//! them with llama.cpp.

use crate::common::{known, *};
use known::{adapter_path, write_adapter};
use samite_core::{CancelToken, DType, Device};
use samite_gguf::{GgufFile, LoadMode, Metadata, TensorSpec, Writer};
use samite_llm::merge::{MergeOptions, merge};
use samite_llm::{Adapter, ContextOptions, Model, ModelOptions, ScaledAdapter, SyntheticModel};
use samite_reference::{FaultPlan, ReferenceDevice, ReferenceOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn load(path: &Path, device: Arc<dyn Device>) -> Arc<Model> {
    Model::load(path, &ModelOptions::new(vec![device])).unwrap()
}

/// Returns the logits of some tokens with adapters of these scales.
fn logits(model: &Arc<Model>, path: &Path, shares: &[f32]) -> Vec<Vec<f32>> {
    let options = ContextOptions {
        adapters: scaled(model, path, shares),
        ..precise()
    };
    decode(&mut context(model, options), &tokens(20), 0, 0)
}

fn scaled(model: &Arc<Model>, path: &Path, shares: &[f32]) -> Vec<ScaledAdapter> {
    let load = |(number, &share)| {
        let adapter = Adapter::load(adapter_path(path, number), model).unwrap();
        ScaledAdapter { adapter, share }
    };
    shares.iter().enumerate().map(load).collect()
}

fn merged(
    path: &Path,
    shares: &[f32],
    dtype: Option<DType>,
) -> samite_llm::Result<(PathBuf, usize)> {
    let named = |(number, &share)| (adapter_path(path, number), share);
    let adapters: Vec<_> = shares.iter().enumerate().map(named).collect();
    let target = path.with_extension("merged.gguf");
    let options = MergeOptions {
        adapters: &adapters,
        dtype,
        threads: 2,
        progress: &|_, _| {},
        cancel: &CancelToken::new(),
    };
    let changed = merge(&GgufFile::open(path, LoadMode::Mmap)?, &target, &options)?;
    Ok((target, changed))
}

#[test]
fn a_merged_model_matches_the_model_with_adapters() {
    let experts = SyntheticModel {
        experts: Some([5, 2]),
        ..SyntheticModel::tiny("llama")
    };
    let tied = SyntheticModel {
        tied: true,
        ..SyntheticModel::tiny("llama")
    };
    for (model, matrices) in [
        (SyntheticModel::tiny("qwen2"), 23),
        (tied, 22),
        (experts, 26),
    ] {
        let file = TestModel::write(&model);
        for number in [0, 1] {
            write_adapter(&file.path, number, |_| true).unwrap();
        }
        let shares = [0.7, -0.4];
        let base = load(&file.path, cpu());
        let applied = logits(&base, &file.path, &shares);
        assert!(nmse(&applied, &logits(&base, &file.path, &[])) > 0.1);
        let (path, changed) = merged(&file.path, &shares, None).unwrap();
        assert_eq!(changed, matrices);
        let error = nmse(&logits(&load(&path, cpu()), &path, &[]), &applied);
        assert!(error < 1e-10, "{error:.1e}");
    }
}

#[test]
fn merged_weights_keep_their_type_or_are_converted() {
    let model = SyntheticModel {
        dtype: DType::Q8_0,
        ..SyntheticModel::tiny("llama")
    };
    let file = TestModel::write(&model);
    let is_query = |name: &str| name.ends_with("attn_q.weight");
    write_adapter(&file.path, 0, is_query).unwrap();
    let base = load(&file.path, reference("r"));
    let applied = logits(&base, &file.path, &[1.0]);
    for (dtype, limit) in [(None, 1e-3), (Some(DType::F16), 1e-5)] {
        let (path, changed) = merged(&file.path, &[1.0], dtype).unwrap();
        assert_eq!(changed, 3);
        let written = GgufFile::open(&path, LoadMode::Read).unwrap();
        for info in written.tensors().iter().filter(|info| info.n_dims == 2) {
            let wanted = dtype.filter(|_| is_query(&info.name));
            assert_eq!(info.dtype, wanted.unwrap_or(DType::Q8_0), "{}", info.name);
        }
        let got = logits(&load(&path, reference("r")), &path, &[]);
        let error = nmse(&got, &applied);
        assert!(error < limit, "{error:.1e}");
    }
    let error = merged(&file.path, &[1.0], Some(DType::I32)).unwrap_err();
    assert!(
        error.to_string().contains("cannot be written as i32"),
        "{error}"
    );
    let error = merged(&file.path, &[], None).unwrap_err();
    assert!(error.to_string().contains("no adapter"), "{error}");
    let error = merged(&file.path, &[f32::NAN], None).unwrap_err();
    assert!(error.to_string().contains("share is NaN"), "{error}");
}

#[test]
fn adapters_change_while_a_context_runs() {
    let file = TestModel::tiny("llama");
    write_adapter(&file.path, 0, |_| true).unwrap();
    let model = load(&file.path, cpu());
    let plain = logits(&model, &file.path, &[]);
    assert_eq!(logits(&model, &file.path, &[0.0]), plain);
    let (whole, half) = (
        logits(&model, &file.path, &[1.0]),
        logits(&model, &file.path, &[0.5]),
    );
    let mut running = context(&model, precise());
    for (shares, expected) in [(&[1.0][..], &whole), (&[0.5], &half), (&[], &plain)] {
        running
            .set_adapters(scaled(&model, &file.path, shares))
            .unwrap();
        running.clear().unwrap();
        assert_eq!(&decode(&mut running, &tokens(20), 0, 0), expected);
    }
    // An adapter of another copy of the model, or with an infinite scale.
    let other = load(&file.path, cpu());
    let wrong = scaled(&other, &file.path, &[1.0]);
    let error = running.set_adapters(wrong).unwrap_err().to_string();
    assert!(error.contains("another model"), "{error}");
    let wrong = scaled(&model, &file.path, &[f32::INFINITY]);
    let error = running.set_adapters(wrong).unwrap_err().to_string();
    assert!(error.contains("share is inf"), "{error}");
    running.clear().unwrap();
    assert_eq!(decode(&mut running, &tokens(20), 0, 0), plain);
}

#[test]
fn adapters_are_placed_with_their_layers() {
    let file = TestModel::tiny("llama");
    write_adapter(&file.path, 0, |_| true).unwrap();
    let alone = logits(&load(&file.path, cpu()), &file.path, &[1.0]);
    let both = file.load(vec![reference("r"), cpu()], "layers=1:r");
    let adapters = scaled(&both, &file.path, &[1.0]);
    assert_eq!(adapters[0].adapter.bytes().count(), 2);
    let options = ContextOptions {
        adapters,
        ..precise()
    };
    let mut context = context(&both, options);
    let split = decode(&mut context, &tokens(20), 0, 0);
    assert!(nmse(&split, &alone) < 1e-10);
}

#[test]
fn mismatched_adapters_are_refused() {
    let file = TestModel::tiny("llama");
    let model = load(&file.path, cpu());
    let path = file.path.with_extension("bad.gguf");
    let refused = |change: &dyn Fn(&mut Metadata), tensors: &[(&str, DType, &[usize])]| {
        let mut metadata = Metadata::new();
        metadata.set("general.type", "adapter").unwrap();
        metadata.set("general.architecture", "llama").unwrap();
        metadata.set("adapter.type", "lora").unwrap();
        metadata.set("adapter.lora.alpha", 4.0f32).unwrap();
        change(&mut metadata);
        let specs = tensors
            .iter()
            .map(|(name, dtype, dims)| TensorSpec::new(name, *dtype, dims).unwrap());
        let specs: Vec<_> = specs.collect();
        let sizes: Vec<_> = specs.iter().map(TensorSpec::size).collect();
        let mut writer = Writer::create(&path, &metadata, specs).unwrap();
        sizes
            .iter()
            .for_each(|&size| writer.append(&vec![0; size]).unwrap());
        writer.commit().unwrap();
        let error = Adapter::load(&path, &model).unwrap_err().to_string();
        assert!(error.contains("bad.gguf"), "{error}");
        error
    };
    let none = |_: &mut Metadata| {};
    let f32 = DType::F32;
    let good: [(&str, DType, &[usize]); 2] = [
        ("blk.0.attn_k.weight.lora_a", f32, &[64, 4]),
        ("blk.0.attn_k.weight.lora_b", f32, &[4, 64]),
    ];
    for (key, value, part) in [
        ("general.type", "model", "is no adapter"),
        ("adapter.type", "vera", "\"vera\" are not supported"),
        ("general.architecture", "qwen2", "this model is \"llama\""),
    ] {
        let change = |metadata: &mut Metadata| {
            metadata.set(key, value).unwrap();
        };
        let error = refused(&change, &good);
        assert!(error.contains(part), "{error}");
    }
    let nan = |metadata: &mut Metadata| {
        metadata.set("adapter.lora.alpha", f32::NAN).unwrap();
    };
    assert!(refused(&nan, &good).contains("adapter.lora.alpha"));
    let waits = |metadata: &mut Metadata| {
        metadata
            .set("adapter.alora.invocation_tokens", vec![1u32])
            .unwrap();
    };
    assert!(refused(&waits, &good).contains("waits for certain tokens"));

    for (tensors, part) in [
        (&[][..], "changes nothing"),
        (&good[..1], "\"blk.0.attn_k.weight.lora_b\" is missing"),
        (&good[1..], "\"blk.0.attn_k.weight.lora_a\" is missing"),
        (
            &[("blk.0.attn_k.weight", f32, &[64, 64])],
            "no part of a pair",
        ),
        (
            &[
                ("blk.9.attn_k.weight.lora_a", f32, &[64, 4]),
                ("blk.9.attn_k.weight.lora_b", f32, &[4, 64]),
            ],
            "blk.9.attn_k.weight\", which the model does not have",
        ),
        (
            &[("blk.0.attn_k.weight.lora_a", f32, &[4, 64]), good[1]],
            "[64, 4, 1, 1]",
        ),
        (
            &[good[0], ("blk.0.attn_k.weight.lora_b", f32, &[4, 63])],
            "[4, 64, 1, 1]",
        ),
        (
            &[
                ("blk.0.attn_k.weight.lora_a", DType::I32, &[64, 4]),
                good[1],
            ],
            "type i32",
        ),
        (
            &[
                ("output_norm.weight.lora_a", f32, &[64, 4]),
                ("output_norm.weight.lora_b", f32, &[4, 1]),
            ],
            "is a vector",
        ),
    ] {
        let error = refused(&none, tensors);
        assert!(error.contains(part), "{error}");
    }
    let error = Adapter::load(&file.path, &model).unwrap_err().to_string();
    assert!(error.contains("is no adapter"), "{error}");
}

#[test]
fn adapters_without_memory_leave_the_previous_ones_active() {
    let file = TestModel::tiny("llama");
    for number in [0, 1] {
        write_adapter(&file.path, number, |_| true).unwrap();
    }
    let faults = FaultPlan::new();
    let device = ReferenceDevice::new(ReferenceOptions {
        faults: Some(Arc::clone(&faults)),
        ..ReferenceOptions::default()
    });
    let model = load(&file.path, device);
    let half = logits(&model, &file.path, &[0.5]);
    let plain = logits(&model, &file.path, &[]);
    assert_ne!(half, plain);
    for before in [&[][..], &[0.5]] {
        let expected = if before.is_empty() { &plain } else { &half };
        let options = ContextOptions {
            adapters: scaled(&model, &file.path, before),
            ..precise()
        };
        let mut running = context(&model, options);
        let others = scaled(&model, &file.path, &[1.0, 0.25]);
        faults.reset();
        faults.fail_from(0);
        running.set_adapters(others).unwrap_err();
        faults.reset();
        let shares: Vec<_> = running.options().adapters.iter().map(|a| a.share).collect();
        assert_eq!(shares, before);
        assert_eq!(&decode(&mut running, &tokens(20), 0, 0), expected);
    }
}

/// Writes a control vector with these directions, after changes of its metadata.
fn write_control(
    path: &Path,
    directions: &[(usize, &[f32])],
    change: impl Fn(&mut Metadata),
) -> PathBuf {
    let path = path.with_extension("control.gguf");
    let mut metadata = Metadata::new();
    metadata
        .set("general.architecture", "controlvector")
        .unwrap();
    metadata.set("controlvector.model_hint", "llama").unwrap();
    change(&mut metadata);
    let specs = directions.iter().map(|(layer, values)| {
        let name = format!("direction.{layer}");
        TensorSpec::new(&name, DType::F32, &[values.len()]).unwrap()
    });
    let mut writer = Writer::create(&path, &metadata, specs.collect()).unwrap();
    for (_, values) in directions {
        writer.append(&bytes_of(values)).unwrap();
    }
    writer.commit().unwrap();
    path
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// A direction that is added to a layer's result is equivalent to an addition to its last bias.
#[test]
fn a_control_vector_acts_as_a_layer_bias() {
    let biased = SyntheticModel {
        optional: vec!["ffn_down.bias"],
        ..SyntheticModel::tiny("llama")
    };
    let file = TestModel::write(&biased);
    let direction = |layer: usize| -> Vec<f32> {
        (0..biased.n_embd)
            .map(|i| ((i * 7 + layer * 5) % 11) as f32 * 0.1 - 0.5)
            .collect()
    };
    let (one, two) = (direction(1), direction(2));
    let control = write_control(&file.path, &[(1, &one), (2, &two)], |_| {});
    // The bias of a layer, minus twice its direction.
    let with_biases = |layers: &[usize]| {
        let source = GgufFile::open(&file.path, LoadMode::Mmap).unwrap();
        let path = file.path.with_extension("changed.gguf");
        let specs = source.tensors().iter();
        let specs = specs.map(|info| TensorSpec::from_info(info, info.dtype).unwrap());
        let mut writer = Writer::create(&path, source.metadata(), specs.collect()).unwrap();
        for info in source.tensors().iter() {
            let mut bytes = source.tensor_bytes(info).unwrap().to_vec();
            for &layer in layers {
                if *info.name == format!("blk.{layer}.ffn_down.bias") {
                    let values = bytes.as_chunks().0.iter().zip(direction(layer));
                    let values = values.map(|(&old, new)| f32::from_le_bytes(old) - 2.0 * new);
                    bytes = bytes_of(&values.collect::<Vec<f32>>());
                }
            }
            writer.append(&bytes).unwrap();
        }
        writer.commit().unwrap();
        logits(&load(&path, cpu()), &path, &[])
    };
    let model = load(&file.path, cpu());
    let plain = logits(&model, &file.path, &[]);
    for (range, layers) in [(0..=usize::MAX, &[1, 2][..]), (1..=1, &[1]), (2..=9, &[2])] {
        let adapter = Adapter::load_control_vector(&control, &model, range).unwrap();
        let options = ContextOptions {
            adapters: vec![ScaledAdapter {
                adapter,
                share: -2.0,
            }],
            ..precise()
        };
        let mut context = context(&model, options);
        let got = decode(&mut context, &tokens(20), 0, 0);
        assert!(nmse(&got, &with_biases(layers)) < 1e-10, "{layers:?}");
        assert!(nmse(&got, &plain) > 1e-3);
        // A sequence that was computed with the vector cannot continue without it.
        let saved = context.save(0).unwrap();
        context.set_adapters(Vec::new()).unwrap();
        let error = context.restore(0, &saved).unwrap_err().to_string();
        assert!(error.contains("other adapters"), "{error}");
        context.clear().unwrap();
        assert_eq!(decode(&mut context, &tokens(20), 0, 0), plain);
    }
    // With both layers on another device, each direction is on the device of its layer.
    let both = file.load(vec![reference("r"), cpu()], "layers=1:cpu");
    let adapter = Adapter::load_control_vector(&control, &both, 0..=9).unwrap();
    assert_eq!(adapter.bytes().count(), 2);
}

#[test]
fn mismatched_control_vectors_are_refused() {
    let file = TestModel::tiny("llama");
    let model = load(&file.path, cpu());
    let good = vec![0.5; 64];
    let none = |_: &mut Metadata| {};
    let refused = |path: &Path, part: &str| {
        let error = Adapter::load_control_vector(path, &model, 1..=1).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(part) && error.contains(".gguf"), "{error}");
    };
    refused(&file.path, "is no control vector");
    let hint = |metadata: &mut Metadata| {
        metadata.set("controlvector.model_hint", "qwen2").unwrap();
    };
    let write = |directions: &[(usize, &[f32])]| write_control(&file.path, directions, none);
    refused(
        &write_control(&file.path, &[(1, &good)], hint),
        "this model is \"llama\"",
    );
    refused(&write(&[(0, &good)]), "does not have");
    refused(&write(&[(3, &good)]), "its last one has number 2");
    refused(&write(&[(1, &good[1..])]), "64 elements");
    refused(&write(&[(2, &good)]), "no direction for layers 1 to 1");
    refused(&write(&[]), "no direction");
}

/// Sequences with different adapters in one batch: each has the same results as alone in a context
/// with these adapters.
#[test]
fn sequences_in_one_batch_use_their_own_adapters() {
    let experts = SyntheticModel {
        experts: Some([5, 2]),
        ..SyntheticModel::tiny("llama")
    };
    let models = [
        ("llama", SyntheticModel::tiny("llama")),
        ("experts", experts),
        (
            "tied",
            SyntheticModel {
                tied: true,
                ..SyntheticModel::tiny("gemma3")
            },
        ),
        ("states", SyntheticModel::tiny("lfm2")),
        ("mamba", SyntheticModel::tiny("mamba")),
        ("delta net", SyntheticModel::tiny("qwen3next")),
        ("streams", SyntheticModel::tiny("gemma3n")),
        ("latent", SyntheticModel::tiny("deepseek2")),
    ];
    for (name, synthetic) in models {
        let file = TestModel::write(&synthetic);
        for number in 0..2 {
            write_adapter(&file.path, number, |_| true).unwrap();
        }
        let model = load(&file.path, reference("alone"));
        let both = scaled(&model, &file.path, &[1.0, -0.5]);
        let sets = [
            Vec::new(),
            vec![both[0].clone()],
            vec![both[1].clone()],
            both.clone(),
        ];
        let text = |sequence: usize| -> Vec<u32> {
            tokens(24).into_iter().skip(2 * sequence).take(9).collect()
        };
        let alone: Vec<_> = sets
            .iter()
            .enumerate()
            .map(|(sequence, set)| {
                let options = ContextOptions {
                    adapters: set.clone(),
                    ..precise()
                };
                // In the same parts: a state is rounded between them.
                let (mut alone, text) = (context(&model, options), text(sequence));
                let mut rows = decode(&mut alone, &text[..5], 0, 0);
                for position in 5..text.len() {
                    let part = &text[position..=position];
                    rows.extend(decode(&mut alone, part, position as i32, 0));
                }
                rows
            })
            .collect();
        let options = ContextOptions {
            n_seq: sets.len(),
            // One sequence uses the context's adapters.
            adapters: sets[3].clone(),
            ..precise()
        };
        let mut mixed = context(&model, options);
        for (sequence, set) in sets.iter().enumerate().take(3) {
            mixed
                .set_sequence_adapters(sequence, Some(set.clone()))
                .unwrap();
        }
        // Tokens of all sequences: first several of each, then one of each, with logits requested
        // for some of them.
        let mut batch = samite_llm::Batch::new();
        for (positions, wanted) in [(0..5, 2), (5..6, 5), (6..7, 6), (7..8, 7), (8..9, 8)] {
            batch.clear();
            let mut rows = Vec::new();
            for sequence in 0..sets.len() {
                for position in positions.clone() {
                    let wants = position >= wanted;
                    let token = text(sequence)[position];
                    batch.add(token, position as i32, &[sequence as u32], wants);
                    rows.push((sequence, position, wants));
                }
            }
            mixed.decode(&batch).unwrap();
            for (row, (sequence, position, wants)) in rows.into_iter().enumerate() {
                if wants {
                    let found = mixed.logits(row).unwrap();
                    let expected = &alone[sequence][position];
                    assert!(found == expected, "{name}: {sequence}, {position}");
                    let other = &alone[(sequence + 1) % 4][position];
                    let error = nmse(&[found.to_vec()], std::slice::from_ref(other));
                    assert!(error > 1e-6, "{name}: {sequence}, {position}: {error}");
                }
            }
        }
        // A sequence that was computed with its own adapters is restored only with the same ones.
        let saved = mixed.save(1).unwrap();
        let error = mixed.restore(2, &saved).unwrap_err().to_string();
        assert!(error.contains("other adapters"), "{name}: {error}");
        mixed
            .set_sequence_adapters(2, Some(sets[1].clone()))
            .unwrap();
        mixed.restore(2, &saved).unwrap();
        // Without adapters, the graph is that of a context without adapters.
        mixed.set_sequence_adapters(3, Some(Vec::new())).unwrap();
    }
}

#[test]
fn sequences_without_adapters_use_the_plain_graph() {
    let file = TestModel::tiny("llama");
    write_adapter(&file.path, 0, |_| true).unwrap();
    let model = load(&file.path, cpu());
    let adapters = scaled(&model, &file.path, &[1.0]);
    let options = ContextOptions {
        n_seq: 2,
        ..precise()
    };
    let nodes = |context: &samite_llm::Context| {
        let plan = context.scheduler().current_plan().unwrap();
        plan.graph().ids().count()
    };
    let mut plain = context(&model, options.clone());
    decode(&mut plain, &tokens(8), 0, 0);
    let mut running = context(&model, options);
    decode(&mut running, &tokens(8), 0, 1);
    running.clear().unwrap();
    // A graph that was loaded before is loaded again.
    running
        .set_sequence_adapters(0, Some(adapters.clone()))
        .unwrap();
    decode(&mut running, &tokens(8), 0, 1);
    assert_eq!(nodes(&running), nodes(&plain));
    decode(&mut running, &tokens(8), 0, 0);
    assert!(nodes(&running) > nodes(&plain));
    // Invalid adapters change nothing.
    let other = load(&file.path, cpu());
    let wrong = scaled(&other, &file.path, &[1.0]);
    let error = running.set_sequence_adapters(1, Some(wrong)).unwrap_err();
    assert!(error.to_string().contains("another model"), "{error}");
    let error = running.set_sequence_adapters(2, None).unwrap_err();
    assert!(error.to_string().contains("sequence 2"), "{error}");
    running.set_sequence_adapters(0, None).unwrap();
    running.clear().unwrap();
    decode(&mut running, &tokens(8), 0, 0);
    assert_eq!(nodes(&running), nodes(&plain));
}
