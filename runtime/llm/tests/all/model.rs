//! Invalid files, and loading that is stopped.

use crate::common::*;
use samite_core::environment::{File, Files};
use samite_core::{Buffer, DType, Device, DeviceWrapper, HostMemory, Role, Usage, WrappedDevice};
use samite_gguf::{GgufFile, LoadMode, Metadata, TensorSpec, Value, Writer};
use samite_llm::{Model, ModelOptions, ModelPlan, PlacementRule, SyntheticModel};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Copies a model with changed metadata, and with tensors replaced by the results of `tensor`.
fn rewrite(
    from: &Path,
    to: &Path,
    metadata: impl Fn(&mut Metadata),
    tensor: impl Fn(&str) -> Option<(&'static str, DType, Vec<usize>)>,
    without: &str,
) {
    let file = GgufFile::open(from, LoadMode::Read).unwrap();
    let mut keys = file.metadata().clone();
    metadata(&mut keys);
    let mut specs = Vec::new();
    for info in file.tensors().iter().filter(|info| &*info.name != without) {
        specs.push(match tensor(&info.name) {
            Some((name, dtype, dims)) => TensorSpec::new(name, dtype, &dims).unwrap(),
            None => TensorSpec::from_info(info, info.dtype).unwrap(),
        });
    }
    let sizes: Vec<usize> = specs.iter().map(TensorSpec::size).collect();
    let mut writer = Writer::create(to, &keys, specs).unwrap();
    for size in sizes {
        writer.append(&vec![0; size]).unwrap();
    }
    writer.commit().unwrap();
}

/// A disk with one file, which fails after some reads.
#[derive(Debug)]
struct Disk {
    content: Arc<Vec<u8>>,
    left: AtomicUsize,
}

impl Files for Disk {
    fn open(&self, _: &Path) -> std::io::Result<Arc<dyn File>> {
        Ok(Arc::new(Disk {
            content: Arc::clone(&self.content),
            left: AtomicUsize::new(self.left.load(Ordering::SeqCst)),
        }))
    }
}

impl File for Disk {
    fn size(&self) -> std::io::Result<u64> {
        Ok(self.content.len() as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        let left = self
            .left
            .try_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                left.checked_sub(1)
            });
        left.map_err(|_| std::io::Error::other("the disk is broken"))?;
        let part = &self.content[offset as usize..][..buffer.len()];
        buffer.copy_from_slice(part);
        Ok(())
    }
}

#[test]
fn disk_errors_at_any_read_are_reported() {
    let file = TestModel::tiny("llama");
    let content = Arc::new(std::fs::read(&file.path).unwrap());
    let load = |reads: usize| {
        let mut options = ModelOptions::new(vec![cpu()]);
        options.environment.files = Arc::new(Disk {
            content: Arc::clone(&content),
            left: AtomicUsize::new(reads),
        });
        Model::load("there.gguf", &options)
    };
    load(usize::MAX).unwrap();
    let mut reads = 0;
    while let Err(error) = load(reads) {
        let error = error.to_string();
        assert!(
            error.contains("there.gguf") && error.contains("the disk is broken"),
            "{error}"
        );
        reads += 1;
    }
    assert!(reads > 10, "{reads} reads");
}

fn refused(
    metadata: impl Fn(&mut Metadata),
    tensor: impl Fn(&str) -> Option<(&'static str, DType, Vec<usize>)>,
    without: &str,
) -> String {
    let file = TestModel::tiny("llama");
    let broken = file.path.with_file_name("broken.gguf");
    rewrite(&file.path, &broken, metadata, tensor, without);
    Model::load(&broken, &ModelOptions::new(vec![cpu()]))
        .unwrap_err()
        .to_string()
}

#[test]
fn impossible_metadata_is_refused() {
    let cases: &[(&str, Value, &str)] = &[
        ("general.architecture", "abacus".into(), "is not supported"),
        ("llama.block_count", 0u32.into(), "is 0"),
        (
            "llama.block_count",
            1_000_000u32.into(),
            "too few for so many layers",
        ),
        ("llama.block_count", 4u32.into(), "blk.3.attn_norm.weight"),
        ("llama.block_count", 2u32.into(), "blk.2."),
        (
            "llama.embedding_length",
            128u32.into(),
            "[64, 320], but by the hyper-parameters it must be [128, 320]",
        ),
        (
            "llama.attention.head_count",
            8u32.into(),
            "blk.0.attn_q.weight",
        ),
        (
            "llama.attention.head_count_kv",
            3u32.into(),
            "share 3 key-value heads",
        ),
        (
            "llama.attention.head_count_kv",
            vec![2u32, 2].into(),
            "or 3 of them",
        ),
        (
            "llama.feed_forward_length",
            95u32.into(),
            "blk.0.ffn_gate.weight",
        ),
        ("llama.rope.dimension_count", 34u32.into(), "head size 32"),
        (
            "tokenizer.ggml.scores",
            vec![0f32].into(),
            "tokenizer.ggml.scores",
        ),
        (
            "tokenizer.ggml.bos_token_id",
            9999u32.into(),
            "tokenizer.ggml.bos_token_id",
        ),
        (
            "tokenizer.ggml.model",
            "abacus".into(),
            "tokenizer.ggml.model",
        ),
    ];
    for (key, value, expected) in cases {
        let set = |metadata: &mut Metadata| {
            metadata.set(key, value.clone()).unwrap();
        };
        let message = refused(set, |_| None, "");
        assert!(message.contains(expected), "{key}: {message}");
    }
}

#[test]
fn mismatched_tensors_are_refused() {
    let keep = |_: &mut Metadata| {};
    let message = refused(keep, |_| None, "blk.1.ffn_norm.weight");
    assert!(
        message.contains("\"blk.1.ffn_norm.weight\": is missing"),
        "{message}"
    );

    let wide = |name: &str| {
        (name == "blk.1.ffn_up.weight").then(|| ("blk.1.ffn_up.weight", DType::F32, vec![64, 97]))
    };
    let message = refused(keep, wide, "");
    let expected = "tensor \"blk.1.ffn_up.weight\" has shape [64, 97], but by the hyper-parameters it must be [64, 96]";
    assert!(message.contains(expected), "{message}");

    let renamed =
        |name: &str| (name == "output.weight").then(|| ("output.scale", DType::F32, vec![64, 320]));
    let message = refused(keep, renamed, "");
    assert!(
        message.contains("\"output.scale\" is not known for architecture llama"),
        "{message}"
    );

    let integers = |name: &str| {
        (name == "blk.0.attn_q.weight").then(|| ("blk.0.attn_q.weight", DType::I32, vec![64, 128]))
    };
    let message = refused(keep, integers, "");
    assert!(
        message.contains("blk.0.attn_q.weight") || message.contains("integer"),
        "{message}"
    );
}

#[test]
fn a_plan_needs_no_weights_and_matches_the_loaded_model() {
    let file = TestModel::write(&SyntheticModel {
        tied: true,
        ..SyntheticModel::tiny("llama")
    });
    let options = ModelOptions {
        rules: PlacementRule::parse_all("layers=2:b").unwrap(),
        load_mode: LoadMode::Read,
        repack: false,
        ..ModelOptions::new(vec![reference("a"), reference("b"), cpu()])
    };
    let gguf = GgufFile::open(&file.path, LoadMode::Read).unwrap();
    let plan = ModelPlan::new(&gguf, &options).unwrap();
    assert_eq!(plan.spec().n_layer(), 3);
    let planned = plan.memory().unwrap();
    assert_eq!(
        planned
            .iter()
            .map(|(name, _)| name.as_str())
            .collect::<Vec<_>>(),
        ["a", "b", "host"]
    );
    let model = Model::from_gguf(&gguf, &options).unwrap();
    let loaded: Vec<_> = model
        .weights()
        .bytes()
        .map(|(n, b)| (n.to_owned(), b))
        .collect();
    assert_eq!(planned, loaded);
    // The embedding is on the host, and a second time on the device of the output.
    let embedding = gguf.tensor("token_embd.weight").unwrap().size;
    assert_eq!(planned[2].1, embedding);
    let all: usize = planned.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(all, gguf.tensors().total_bytes() as usize + embedding);
}

#[test]
fn mapped_weights_are_used_in_place() {
    let file = TestModel::tiny("llama");
    for (load_mode, in_place) in [(LoadMode::Mmap, true), (LoadMode::Read, false)] {
        let gguf = GgufFile::open(&file.path, load_mode).unwrap();
        let options = ModelOptions {
            repack: false,
            ..ModelOptions::new(vec![cpu()])
        };
        let plan = ModelPlan::new(&gguf, &options).unwrap();
        assert!(
            plan.tensors()
                .iter()
                .all(|tensor| tensor.in_place == in_place)
        );
        let plan = ModelPlan::new(&gguf, &ModelOptions::new(vec![reference("a")])).unwrap();
        assert!(plan.tensors().iter().all(|tensor| !tensor.in_place));
    }
}

#[test]
fn lookup_tables_are_not_repacked() {
    for tied in [false, true] {
        let file = TestModel::write(&SyntheticModel {
            dtype: DType::Q8_0,
            tied,
            ..SyntheticModel::tiny("llama")
        });
        let gguf = GgufFile::open(&file.path, LoadMode::Mmap).unwrap();
        let memories = |repack| {
            let options = ModelOptions {
                repack,
                ..ModelOptions::new(vec![cpu()])
            };
            let plan = ModelPlan::new(&gguf, &options).unwrap();
            ["token_embd.weight", "output.weight"].map(|name| {
                let tensor = plan.tensors().iter().find(|tensor| tensor.name == name);
                let tensor = tensor.unwrap();
                (tensor.memory.name().to_owned(), tensor.in_place)
            })
        };
        let [host, packed] = [("host", true), ("cpu-packed", false)]
            .map(|(name, in_place)| (name.to_owned(), in_place));
        assert_eq!(memories(false), [host.clone(), host.clone()]);
        let packs = !cpu().extra_buffer_types().is_empty();
        let [embedding, output] = memories(true);
        let expected = if packs { packed } else { host.clone() };
        assert_eq!(output, expected);
        // An embedding that is also the output matrix is stored once.
        assert_eq!(embedding, if tied { expected } else { host });
    }
}

#[test]
fn token_cost_counts_the_multiplied_weights() {
    let cost = |model: SyntheticModel| {
        let file = TestModel::write(&model);
        let gguf = GgufFile::open(&file.path, LoadMode::Read).unwrap();
        let model = Model::from_gguf(&gguf, &ModelOptions::new(vec![cpu()])).unwrap();
        let bytes = |name: &str| gguf.tensor(name).map_or(0, |tensor| tensor.size) as f64;
        let layers: usize = gguf
            .tensors()
            .iter()
            .filter(|t| t.name.starts_with("blk") && t.n_dims > 1)
            .map(|t| t.elements())
            .sum();
        (
            model.token_cost(),
            gguf.tensors().total_bytes() as f64,
            bytes("token_embd.weight"),
            bytes("blk.0.ffn_up_exps.weight"),
            layers as f64,
        )
    };
    let (untied, all, embedding, _, layers) = cost(SyntheticModel::tiny("llama"));
    assert_eq!(untied.read_bytes, all - embedding);
    assert_eq!(
        (untied.float_products, untied.quantized_products),
        (layers, 0.0)
    );
    let (tied, all, ..) = cost(SyntheticModel {
        tied: true,
        dtype: DType::Q8_0,
        ..SyntheticModel::tiny("llama")
    });
    assert_eq!(tied.read_bytes, all);
    assert_eq!(
        (tied.float_products, tied.quantized_products),
        (0.0, layers)
    );
    // 2 of 6 experts are used, with three matrices in each of three layers.
    let (mixture, all, embedding, experts, layers) = cost(SyntheticModel::tiny("qwen3moe"));
    let unused = 9.0 * experts * 4.0 / 6.0;
    assert!((mixture.read_bytes - (all - embedding - unused)).abs() < 1.0);
    assert!((mixture.float_products - (layers - unused / 4.0)).abs() < 1.0);
}

#[test]
fn rules_without_a_match_are_refused() {
    let file = TestModel::tiny("llama");
    let load = |rules: &str| {
        let options = ModelOptions {
            rules: PlacementRule::parse_all(rules).unwrap(),
            ..ModelOptions::new(vec![cpu()])
        };
        Model::load(&file.path, &options)
    };
    assert!(load("layers=0-1:cpu").is_ok());
    assert!(
        load("layers=3-:cpu")
            .unwrap_err()
            .to_string()
            .contains("matches nothing")
    );
    assert!(
        load("output:gpu")
            .unwrap_err()
            .to_string()
            .contains("among the devices in use: cpu")
    );
}

#[test]
fn all_load_modes_give_the_same_results() {
    let file = TestModel::tiny("qwen2");
    let run = |load_mode, repack| {
        let done = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&done);
        let options = ModelOptions {
            load_mode,
            repack,
            threads: Some(2),
            progress: Some(Arc::new(move |now, total| {
                assert!(now <= total && seen.swap(now, Ordering::SeqCst) <= now);
            })),
            ..ModelOptions::new(vec![cpu()])
        };
        let model = Model::load(&file.path, &options).unwrap();
        let total = GgufFile::open(&file.path, LoadMode::Read)
            .unwrap()
            .tensors()
            .total_bytes();
        assert_eq!(done.load(Ordering::SeqCst), total);
        decode(&mut context(&model, precise()), &tokens(6), 0, 0)
    };
    let mapped = run(LoadMode::Mmap, false);
    assert_eq!(mapped, run(LoadMode::Read, false));
    assert_eq!(mapped, run(LoadMode::Direct, false));
    assert_eq!(run(LoadMode::Mmap, true), run(LoadMode::Read, true));
}

/// Returns the number of bytes that this process has locked.
#[cfg(target_os = "linux")]
fn locked_by_this_process() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let kibibytes = line.unwrap().trim().trim_end_matches(" kB");
    kibibytes.parse::<usize>().unwrap() * 1024
}

/// The only test here that locks memory, because the number applies to the whole process.
#[cfg(target_os = "linux")]
#[test]
fn weights_in_use_are_locked_in_memory() {
    const SLACK: usize = 64 << 10; // Pages at the ends.
    let file = TestModel::write(&SyntheticModel {
        dtype: DType::Q8_0,
        n_vocab: 20_000,
        ..SyntheticModel::tiny("llama")
    });
    assert_eq!(locked_by_this_process(), 0);
    let cases = [
        (LoadMode::Mmap, true),
        (LoadMode::Mmap, false),
        (LoadMode::Read, true),
        (LoadMode::Read, false),
    ];
    for (load_mode, repack) in cases {
        let last = Arc::new(Mutex::new((0, 0)));
        let seen = Arc::clone(&last);
        let options = ModelOptions {
            load_mode,
            repack,
            lock: true,
            progress: Some(Arc::new(move |done, total| {
                *seen.lock().unwrap() = (done, total);
            })),
            ..ModelOptions::new(vec![cpu()])
        };
        let model = Model::load(&file.path, &options).unwrap();
        let bytes: usize = model.weights().bytes().map(|(_, bytes)| bytes).sum();
        assert!(bytes > 4 * SLACK, "{bytes}");
        if let Some(refused) = model.weights().lock_refused() {
            assert!(refused.to_string().contains("RLIMIT_MEMLOCK"), "{refused}");
            assert_eq!(locked_by_this_process(), 0);
            println!("skipped: {refused}");
            return;
        }
        let locked = locked_by_this_process();
        assert_eq!(model.weights().locked_bytes(), locked);
        // Locking is part of the progress.
        let (done, total) = *last.lock().unwrap();
        assert_eq!(done, total);
        assert!(total as usize > bytes + bytes / 2, "{total} of {bytes}");
        // Everything that is used, and nothing else of the file.
        assert!(
            (bytes..bytes + SLACK).contains(&locked),
            "{load_mode:?}, repack {repack}: {locked} of {bytes}"
        );
        drop(model);
        assert_eq!(locked_by_this_process(), 0, "unlocked when it is dropped");
    }
    let options = ModelOptions {
        lock: true,
        ..ModelOptions::new(vec![cpu()])
    };
    options.cancel.cancel();
    assert!(
        Model::load(&file.path, &options)
            .unwrap_err()
            .is_cancelled()
    );
    let model = Model::load(&file.path, &ModelOptions::new(vec![cpu()])).unwrap();
    assert_eq!(
        (model.weights().locked_bytes(), locked_by_this_process()),
        (0, 0)
    );
}

#[test]
fn loading_can_be_cancelled() {
    let file = TestModel::tiny("llama");
    for load_mode in [LoadMode::Mmap, LoadMode::Read] {
        let mut options = ModelOptions {
            load_mode,
            threads: Some(1),
            ..ModelOptions::new(vec![reference("a")])
        };
        let cancel = options.cancel.clone();
        options.progress = Some(Arc::new(move |_, _| cancel.cancel()));
        let error = Model::load(&file.path, &options).unwrap_err();
        assert!(error.is_cancelled(), "{error}");
        assert!(
            Model::load(&file.path, &options)
                .unwrap_err()
                .is_cancelled()
        );
    }
}

/// A device that reports that it can import host memory, but fails.
struct NoImport(Arc<dyn Device>);

impl DeviceWrapper for NoImport {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.0
    }
    fn import_host(&self, _: Arc<HostMemory>, _: Usage) -> samite_core::Result<Arc<dyn Buffer>> {
        Err(samite_core::Error::unsupported(
            "ref",
            "this import",
            "it is a test",
        ))
    }
}

#[test]
fn weights_that_cannot_be_imported_are_copied() {
    let file = TestModel::tiny("llama");
    let importing = |alignment| -> Arc<dyn Device> {
        ReferenceDevice::new(ReferenceOptions {
            import_host: true,
            import_alignment: alignment,
            memory_limit: Some(1 << 30),
            ..ReferenceOptions::named("ref")
        })
    };
    let refusing = WrappedDevice::device(NoImport(importing(1)));
    let mut results = Vec::new();
    for (device, copies) in [
        (importing(1), false),
        (importing(1 << 16), true),
        (refusing, true),
    ] {
        let mut options = ModelOptions::new(vec![Arc::clone(&device)]);
        options.load_mode = LoadMode::Mmap;
        let model = Model::load(&file.path, &options).unwrap();
        let memory = device.memory();
        let taken = memory.total.unwrap() - memory.free.unwrap();
        assert_eq!(taken > 0, copies, "{taken} bytes of its own memory");
        results.push(decode(&mut context(&model, precise()), &tokens(8), 0, 0));
    }
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0], results[2]);
}

#[test]
fn weights_have_the_expected_roles() {
    let file = TestModel::tiny("llama");
    let model = file.load(vec![reference("a"), cpu()], "layers=1:cpu");
    let role = |name: &str| model.weights().get(name).unwrap().role();
    for layer in ["blk.0.", "blk.1."] {
        for (name, expected) in [
            ("attn_norm", Role::Vector),
            ("attn_q", Role::Expand),
            ("attn_output", Role::Reduce),
            ("ffn_gate", Role::Expand),
            ("ffn_down", Role::Reduce),
        ] {
            assert_eq!(role(&format!("{layer}{name}.weight")), expected, "{name}");
        }
    }
    assert_eq!(role("token_embd.weight"), Role::Embedding);
    assert_eq!(role("output.weight"), Role::Head);
}

#[test]
fn a_model_keeps_all_metadata_of_its_file() {
    let file = TestModel::tiny("qwen3");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("with-sampling.gguf");
    let add = |keys: &mut Metadata| {
        keys.set("general.sampling.temp", 0.25_f32).unwrap();
        keys.set("tokenizer.chat_template.rerank", "{{ query }}")
            .unwrap();
    };
    rewrite(&file.path, &path, add, |_| None, "");
    let model = Model::load(&path, &ModelOptions::new(vec![cpu()])).unwrap();
    let written = GgufFile::open(&path, LoadMode::Read).unwrap();
    assert_eq!(model.metadata().len(), written.metadata().len());
    let params = samite_llm::sampler_params(model.metadata()).unwrap();
    assert_eq!(params.temperature, 0.25);
    let template = model
        .metadata()
        .get::<&str>("tokenizer.chat_template.rerank");
    assert_eq!(template.unwrap(), Some("{{ query }}"));
}
