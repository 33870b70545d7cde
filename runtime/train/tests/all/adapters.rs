//! LoRA adapters: trained on all supported kinds of models, written, run, and trained further.

use samite_core::{CancelToken, DType, Device};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_llm::{
    Adapter, Batch, Context, ContextOptions, Model, ModelOptions, PlacementRule, ScaledAdapter,
    SyntheticModel,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_train::{Checkpoint, Config, Trainer, export, export_adapter};
use std::path::Path;
use std::sync::Arc;

const CONFIG: &str = r#"
    seed = 3
    [lora]
    base = ""
    rank = 4
    alpha = 8.0
    context = 12
    targets = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output"]
    [data]
    train = ""
    held_out = ""
    [training]
    steps = 50
    batch = 2
    schedule = { rate = 0.01 }
    clip = 1.0
"#;

fn config() -> Config {
    Config::from_toml(CONFIG).unwrap()
}

fn cpu(threads: usize) -> Arc<dyn Device> {
    CpuDevice::new(CpuOptions::default().with_threads(threads))
}

fn reference() -> Arc<dyn Device> {
    ReferenceDevice::new(ReferenceOptions::named("r"))
}

fn base(
    folder: &Path,
    model: &SyntheticModel,
    devices: Vec<Arc<dyn Device>>,
    rules: &str,
) -> Arc<Model> {
    let path = folder.join("base.gguf");
    model.write(&path).unwrap();
    let options = ModelOptions {
        repack: false,
        rules: PlacementRule::parse_all(rules).unwrap(),
        ..ModelOptions::new(devices)
    };
    Model::load(path, &options).unwrap()
}

fn window(first: u32) -> Vec<u32> {
    (0..13).map(|i| (first + i * 7) % 300).collect()
}

fn losses(trainer: &mut Trainer, steps: usize) -> Vec<f32> {
    (0..steps)
        .map(|_| {
            let step = trainer.steps() as u32;
            trainer
                .step(&[&window(step % 4), &window(3 + step % 4)])
                .unwrap()
                .loss
        })
        .collect()
}

/// Returns the loss of a window, computed by a context that runs the model with the adapter from a
/// file.
fn loss_of(model: &Arc<Model>, adapter: &Path, window: &[u32]) -> f64 {
    let adapter = Adapter::load(adapter, model).unwrap();
    let options = ContextOptions {
        n_ctx: Some(32),
        kv_types: [DType::F32; 2],
        adapters: vec![ScaledAdapter {
            adapter,
            share: 1.0,
        }],
        ..ContextOptions::default()
    };
    let mut context = Context::new(Arc::clone(model), options).unwrap();
    let mut batch = Batch::new();
    for (i, &token) in window[..12].iter().enumerate() {
        batch.add(token, i as i32, &[0], true);
    }
    context.decode(&batch).unwrap();
    let loss = |i: usize| {
        let logits = context.logits(i).unwrap();
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        sum.ln() - f64::from(logits[window[i + 1] as usize])
    };
    (0..12).map(loss).sum::<f64>() / 12.0
}

/// Training and inference agree for heads of any width, biases, uneven RoPE frequencies, and YaRN.
#[test]
fn a_trained_adapter_can_be_run() {
    let folder = tempfile::tempdir().unwrap();
    let with = |architecture, optional: &[&'static str]| SyntheticModel {
        optional: optional.to_vec(),
        ..SyntheticModel::tiny(architecture)
    };
    let mut yarn = with(
        "llama",
        &["rope_freqs.weight", "attn_output.bias", "output.bias"],
    );
    yarn.extra = vec![
        ("rope.scaling.type", "yarn".into()),
        ("rope.scaling.factor", 4.0f32.into()),
        ("rope.scaling.original_context_length", 64u32.into()),
    ];
    for model in [with("llama", &[]), with("qwen2", &[]), yarn] {
        let base = base(folder.path(), &model, vec![cpu(1)], "");
        let mut run =
            Trainer::for_adapter(config(), Arc::clone(&base), CancelToken::new()).unwrap();
        let path = folder.path().join("adapter.gguf");
        let text = window(5);
        let both = [&text[..], &text];
        let mut before = None;
        for steps in [0, 30] {
            losses(&mut run, steps);
            export_adapter(&path, &mut run, DType::F32).unwrap();
            let trained = f64::from(run.evaluate(&both).unwrap().loss);
            let loss = loss_of(&base, &path, &text);
            assert!((trained - loss).abs() < 1e-4, "{trained} and {loss}");
            if let Some(before) = before.replace(loss) {
                assert!(loss < 0.7 * before, "{loss} after {before}");
            }
        }
    }
}

/// With quantized weights, the CPU also rounds the activations.
#[test]
fn devices_agree_for_every_weight_type() {
    let folder = tempfile::tempdir().unwrap();
    for (dtype, limit) in [(DType::F32, 1e-4), (DType::F16, 1e-3), (DType::Q8_0, 0.05)] {
        let model = SyntheticModel {
            dtype,
            n_ff: 128,
            ..SyntheticModel::tiny("llama")
        };
        let run = |devices, rules: &str, recompute| {
            let mut config = config();
            config.training.recompute = recompute;
            let base = base(folder.path(), &model, devices, rules);
            let mut run = Trainer::for_adapter(config, base, CancelToken::new()).unwrap();
            losses(&mut run, 20)
        };
        let alone = run(vec![cpu(1)], "", false);
        assert!(alone[19] < 0.8 * alone[0], "{alone:?}");
        assert_eq!(run(vec![cpu(2)], "", true), alone);
        for (devices, rules) in [
            (vec![reference()], ""),
            (vec![reference(), cpu(1)], "layers=1:r"),
        ] {
            for (step, (a, b)) in run(devices, rules, false).iter().zip(&alone).enumerate() {
                assert!(
                    (a - b).abs() < limit * b,
                    "{dtype}, step {step}: {a} and {b}"
                );
            }
        }
    }
}

#[test]
fn a_resumed_adapter_matches_an_uninterrupted_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint.gguf");
    let model = SyntheticModel::tiny("llama");
    let base_of = |model: &SyntheticModel| base(folder.path(), model, vec![cpu(1)], "");
    let start = |base| Trainer::for_adapter(config(), base, CancelToken::new()).unwrap();
    let mut whole = start(base_of(&model));
    let expected = losses(&mut whole, 10);
    let mut first = start(base_of(&model));
    let mut parts = losses(&mut first, 4);
    Checkpoint::save(&path, &mut first, 0).unwrap();
    let mut second = start(base_of(&model));
    Checkpoint::load(&path, &mut second, 0).unwrap();
    parts.extend(losses(&mut second, 6));
    assert_eq!(parts, expected);
    let other = SyntheticModel { seed: 2, ..model };
    let mut other = start(base_of(&other));
    let error = Checkpoint::load(&path, &mut other, 0)
        .unwrap_err()
        .to_string();
    assert!(error.contains("an adapter of another model"), "{error}");
}

#[test]
fn unsupported_adapter_targets_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |model: &SyntheticModel, targets: &[&str]| {
        let mut config = config();
        config.lora.as_mut().unwrap().targets = targets.iter().map(|t| (*t).into()).collect();
        let base = base(folder.path(), model, vec![cpu(1)], "");
        let error = Trainer::for_adapter(config, base, CancelToken::new());
        error.unwrap_err().to_string()
    };
    let llama = SyntheticModel::tiny("llama");
    let error = refused(&llama, &["attn_q", "attn_x"]);
    assert!(
        error.contains("no matrix 'attn_x'") && error.contains("ffn_down and output"),
        "{error}"
    );
    let tied = SyntheticModel {
        tied: true,
        ..llama.clone()
    };
    assert!(refused(&tied, &["output"]).contains("no matrix 'output'"));
    assert!(refused(&llama, &["token_embd"]).contains("no matrix 'token_embd'"));
    let error = refused(&SyntheticModel::tiny("qwen3"), &["attn_q"]);
    assert!(error.contains("not for qwen3"), "{error}");

    // A model cannot be exported as an adapter, nor an adapter as a model.
    let base = base(folder.path(), &llama, vec![cpu(1)], "");
    let mut run = Trainer::for_adapter(config(), base, CancelToken::new()).unwrap();
    let vocabulary = samite_train::Vocabulary::train("a b", 262).unwrap();
    let error = export(folder.path().join("x"), &mut run, &vocabulary, DType::F32).unwrap_err();
    assert!(error.to_string().contains("export_adapter"), "{error}");
    let error = export_adapter(folder.path().join("x"), &mut run, DType::Q8_0).unwrap_err();
    assert!(!folder.path().join("x").exists(), "{error}");
    let error = Trainer::new(config(), vec![cpu(1)], &[], CancelToken::new()).unwrap_err();
    assert!(error.to_string().contains("needs its model"), "{error}");
}
