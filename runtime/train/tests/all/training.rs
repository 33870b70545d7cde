//! Whole training runs: gradients of a model, agreement of devices, checkpoints, invalid input.

use samite_core::{CancelToken, DType, Device};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_gguf::{GgufFile, LoadMode};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_train::{Checkpoint, Config, Dataset, Error, Order, Trainer, Vocabulary, export};
use std::sync::Arc;

const CONFIG: &str = r#"
    seed = 3
    [model]
    vocabulary = 40
    layers = 2
    width = 16
    heads = 4
    kv_heads = 2
    feed_forward = 24
    context = 8
    [data]
    train = ""
    held_out = ""
    [training]
    steps = 50
    batch = 2
    schedule = { rate = 0.01, last_rate = 0.001, warmup = 5 }
    optimizer = { kind = "adamw", weight_decay = 0.1 }
    clip = 1.0
"#;

fn config() -> Config {
    Config::from_toml(CONFIG).unwrap()
}

fn cpu(threads: usize) -> Arc<dyn Device> {
    CpuDevice::new(CpuOptions::default().with_threads(threads))
}

fn reference(name: &str) -> Arc<dyn Device> {
    ReferenceDevice::new(ReferenceOptions::named(name))
}

fn trainer(config: &Config, devices: Vec<Arc<dyn Device>>, layers: &[usize]) -> Trainer {
    Trainer::new(config.clone(), devices, layers, CancelToken::new()).unwrap()
}

/// Returns a text in which each token depends on the previous one.
fn data() -> Dataset {
    let tokens: Vec<u32> = (0..400u32).map(|i| (i * 7 + i / 13) % 40).collect();
    Dataset::new(tokens, (0..380).step_by(5).collect(), 8).unwrap()
}

fn losses(trainer: &mut Trainer, steps: usize) -> Vec<f32> {
    let data = data();
    let training = trainer.config().training;
    let count = training.batch * training.accumulate;
    let mut order = Order::new(trainer.config().seed, data.len());
    (0..steps)
        .map(|_| {
            let first = trainer.steps() * count as u64;
            let windows: Vec<_> = (0..count as u64)
                .map(|i| data.window(order.at(first + i)))
                .collect();
            trainer.step(&windows).unwrap().loss
        })
        .collect()
}

#[track_caller]
fn close(a: &[f32], b: &[f32]) {
    for (step, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() < 1e-4, "step {step}: {a} and {b}");
    }
}

#[test]
fn losses_agree_on_single_and_split_devices() {
    let config = config();
    let expected = losses(&mut trainer(&config, vec![reference("r")], &[]), 50);
    assert!(expected[49] < 0.8 * expected[0], "{expected:?}");
    let alone = losses(&mut trainer(&config, vec![cpu(1)], &[]), 50);
    close(&alone, &expected);
    let devices = vec![cpu(1), reference("r")];
    let together = losses(&mut trainer(&config, devices, &[0, 1]), 50);
    close(&together, &expected);
    // Results are bit-identical for any number of threads.
    assert_eq!(losses(&mut trainer(&config, vec![cpu(3)], &[]), 50), alone);
}

#[test]
fn sgd_with_momentum_learns() {
    let mut config = config();
    config.training.optimizer = samite_train::Optimizer::Sgd {
        momentum: 0.9,
        weight_decay: 0.01,
    };
    config.training.schedule.rate = 0.1;
    let expected = losses(&mut trainer(&config, vec![reference("r")], &[]), 50);
    assert!(expected[49] < 0.8 * expected[0], "{expected:?}");
    close(
        &losses(&mut trainer(&config, vec![cpu(1)], &[]), 50),
        &expected,
    );
}

#[test]
fn accumulated_batches_match_one_large_batch() {
    let mut config = config();
    config.training.batch = 4;
    let whole = losses(&mut trainer(&config, vec![cpu(1)], &[]), 20);
    config.training.batch = 1;
    config.training.accumulate = 4;
    close(
        &losses(&mut trainer(&config, vec![cpu(1)], &[]), 20),
        &whole,
    );
}

#[test]
fn a_resumed_run_matches_an_uninterrupted_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint.gguf");
    let config = config();
    let whole = losses(&mut trainer(&config, vec![cpu(1)], &[]), 30);
    let mut first = trainer(&config, vec![cpu(1)], &[]);
    let mut parts = losses(&mut first, 12);
    let data = data().fingerprint();
    Checkpoint::save(&path, &mut first, data).unwrap();
    let mut second = trainer(&config, vec![cpu(1)], &[]);
    Checkpoint::load(&path, &mut second, data).unwrap();
    assert_eq!(second.steps(), 12);
    parts.extend(losses(&mut second, 18));
    assert_eq!(parts, whole);

    // Of another run, of other data, and of no run at all.
    let message = |config: &Config, data| {
        let mut other = trainer(config, vec![cpu(1)], &[]);
        Checkpoint::load(&path, &mut other, data)
            .unwrap_err()
            .to_string()
    };
    let mut other = config.clone();
    other.model.as_mut().unwrap().feed_forward = 20;
    let error = message(&other, data);
    assert!(
        error.contains("model.feed_forward was 24 there and is 20"),
        "{error}"
    );
    assert!(message(&config, data + 1).contains("other data"));
    // The paths of the files do not matter.
    other = config.clone();
    other.data.train = "elsewhere".into();
    let mut moved = trainer(&other, vec![cpu(1)], &[]);
    Checkpoint::load(&path, &mut moved, data).unwrap();
    export(
        &path,
        &mut moved,
        &Vocabulary::train("ab ab", 262).unwrap(),
        DType::F32,
    )
    .unwrap();
    assert!(message(&config, data).contains("no checkpoint"));
}

#[test]
fn a_failed_save_preserves_the_previous_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint.gguf");
    let mut run = trainer(&config(), vec![cpu(1)], &[]);
    Checkpoint::save(&path, &mut run, 0).unwrap();
    let before = std::fs::read(&path).unwrap();
    losses(&mut run, 1);
    // A file cannot be created in a path that is not a folder.
    let impossible = path.join("checkpoint.gguf");
    assert!(Checkpoint::save(impossible, &mut run, 0).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), before);
    Checkpoint::save(&path, &mut run, 0).unwrap();
    assert_ne!(std::fs::read(&path).unwrap(), before);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn recomputation_gives_equal_results_with_less_memory() {
    let mut config = config();
    let model = config.model.as_mut().unwrap();
    (model.layers, model.feed_forward) = (6, 64);
    config.training.batch = 4;
    let run = |device: Arc<dyn Device>, recompute| {
        let mut config = config.clone();
        config.training.recompute = recompute;
        let mut run = trainer(&config, vec![device], &[]);
        let losses = losses(&mut run, 10);
        let names = [
            "token_embd.weight",
            "blk.0.attn_k.weight",
            "blk.5.ffn_down.weight",
        ];
        let weights = names.map(|name| run.read(name).unwrap());
        let bytes: usize = run
            .scheduler_mut()
            .buffer_sizes()
            .iter()
            .map(|(_, bytes)| bytes)
            .sum();
        (losses, weights, bytes)
    };
    let (kept, again) = (run(cpu(2), false), run(cpu(2), true));
    assert_eq!(kept.0, again.0);
    assert_eq!(kept.1, again.1);
    // The reference device needs no workspace besides the results.
    let (kept, again) = (run(reference("r"), false), run(reference("r"), true));
    assert!(2 * again.2 < kept.2, "{} and {} bytes", again.2, kept.2);
}

#[test]
fn models_are_written_with_their_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let vocabulary = Vocabulary::train("the cat sat on the mat, the end", 280).unwrap();
    let mut config = config();
    let model = config.model.as_mut().unwrap();
    model.vocabulary = vocabulary.len();
    model.width = 32;
    model.feed_forward = 64;
    let mut run = trainer(&config, vec![cpu(1)], &[]);
    for dtype in [DType::F32, DType::F16, DType::Q8_0] {
        let path = folder.path().join(format!("{dtype}.gguf"));
        export(&path, &mut run, &vocabulary, dtype).unwrap();
        let file = GgufFile::open(&path, LoadMode::Read).unwrap();
        assert_eq!(
            file.require_tensor("token_embd.weight").unwrap().dtype,
            dtype
        );
        assert_eq!(
            file.require_tensor("output_norm.weight").unwrap().dtype,
            DType::F32
        );
        let width: u32 = file.metadata().require("llama.embedding_length").unwrap();
        assert_eq!(width, 32);
    }
    // Rows of 32 elements do not form blocks of 256.
    let error = export(folder.path().join("x"), &mut run, &vocabulary, DType::Q4_K);
    assert!(error.is_err());
}

#[test]
fn invalid_training_input_is_refused_with_the_reason() {
    let config = config();
    let mut run = trainer(&config, vec![cpu(1)], &[]);
    let window: Vec<u32> = (0..9).collect();
    let mut bad = window.clone();
    bad[3] = 40;
    let error = run.step(&[&window, &bad]).unwrap_err().to_string();
    assert!(
        error.contains("token 40") && error.contains("40 of the vocabulary"),
        "{error}"
    );
    let error = run.step(&[&window]).unwrap_err().to_string();
    assert!(error.contains("2 windows"), "{error}");
    let error = run.step(&[&window, &window[1..]]).unwrap_err().to_string();
    assert!(error.contains("8 tokens"), "{error}");
    assert_eq!(run.steps(), 0);
    let vocabulary = Vocabulary::train("a b", 262).unwrap().tokenizer().unwrap();
    let error = Dataset::from_lines("\n \n", &vocabulary, 8)
        .unwrap_err()
        .to_string();
    assert!(error.contains("0 tokens"), "{error}");
    let none = Trainer::new(config, Vec::new(), &[], CancelToken::new()).unwrap_err();
    assert!(none.to_string().contains("no device"), "{none}");
}

#[test]
fn a_non_finite_loss_names_the_first_bad_result() {
    let mut config = config();
    config.training.clip = 0.0;
    config.training.schedule.rate = 1e30;
    config.training.schedule.last_rate = None;
    config.training.schedule.warmup = 0;
    let mut run = trainer(&config, vec![cpu(1)], &[]);
    let data = data();
    let error = (0..10).find_map(|i| {
        run.step(&[data.window(2 * i), data.window(2 * i + 1)])
            .err()
    });
    match error.unwrap() {
        Error::Diverged { first, .. } => {
            assert!(
                first.contains("the first result that is not finite is that of"),
                "{first}"
            );
        }
        other => panic!("{other}"),
    }
}
