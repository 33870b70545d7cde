//! Mutated files of every architecture, with one error each: the result is an error or a model that
//! computes, never a panic or a hang.

use crate::common::*;
use samite_core::environment::{File, Files};
use samite_gguf::{Array, GgufFile, LoadMode, Metadata, TensorSpec, Value, Writer};
use samite_llm::arch::ARCHITECTURES;
use samite_llm::{Batch, Context, ContextOptions, Model, ModelOptions};
use samite_testing::HANG_GUARD;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// A disk with one file.
#[derive(Clone, Debug)]
struct Disk(Arc<Vec<u8>>);

impl Files for Disk {
    fn open(&self, _: &Path) -> std::io::Result<Arc<dyn File>> {
        Ok(Arc::new(self.clone()))
    }
}

impl File for Disk {
    fn size(&self) -> std::io::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        let part = offset as usize..offset as usize + buffer.len();
        buffer.copy_from_slice(&self.0[part]);
        Ok(())
    }
}

/// The parts of a file.
struct GraphContext {
    metadata: Metadata,
    tensors: Vec<(TensorSpec, Vec<u8>)>,
}

impl GraphContext {
    fn read(path: &Path) -> Self {
        let file = GgufFile::open(path, LoadMode::Read).unwrap();
        let tensors = file.tensors().iter().map(|info| {
            let mut bytes = vec![0; info.size];
            file.read_tensor_into(info, &mut bytes).unwrap();
            (TensorSpec::from_info(info, info.dtype).unwrap(), bytes)
        });
        GraphContext {
            tensors: tensors.collect(),
            metadata: file.metadata().clone(),
        }
    }

    fn encode(&self, metadata: &Metadata, skipped: Option<usize>) -> Vec<u8> {
        let kept = || {
            let all = self.tensors.iter().enumerate();
            all.filter(|(i, _)| Some(*i) != skipped).map(|(_, t)| t)
        };
        let specs = kept().map(|(spec, _)| spec.clone()).collect();
        let mut writer = Writer::new(Vec::new(), metadata, specs).unwrap();
        for (_, bytes) in kept() {
            writer.append(bytes).unwrap();
        }
        writer.finish().unwrap()
    }
}

/// Returns values that are invalid, or perhaps invalid, for a key.
fn hostile(value: &Value) -> Vec<Value> {
    let mut values: Vec<Value> = vec![
        "x".into(),
        f32::NAN.into(),
        (-1i32).into(),
        0u32.into(),
        u32::MAX.into(),
        u64::MAX.into(),
        Vec::<u32>::new().into(),
        vec![0u32, 1, u32::MAX].into(),
    ];
    match value {
        Value::F32(_) => values.extend([0.0f32, -1.0, 1e30, f32::INFINITY].map(Value::from)),
        Value::Array(Array::U32(items)) => {
            values.push(vec![0u32; items.len()].into());
            values.push(vec![u32::MAX; items.len()].into());
            values.push(vec![1u32; items.len() + 1].into());
        }
        _ => values.extend([1u32, 2, 3, 5, 100, 1 << 20, i32::MAX as u32].map(Value::from)),
    }
    values
}

/// Loads a file, and computes with it if possible.
fn try_out(bytes: Vec<u8>, what: &str) -> bool {
    let start = Instant::now();
    let mut options = ModelOptions::new(vec![cpu()]);
    options.environment.files = Arc::new(Disk(Arc::new(bytes)));
    let result = Model::load("there.gguf", &options).and_then(|model| {
        let output = output_of(&model);
        let mut context = Context::new(
            model,
            ContextOptions {
                n_ctx: Some(16),
                output,
                ..precise()
            },
        )?;
        context.decode(&Batch::sequence(&[1, 2, 3], 0, 0))?;
        context.decode(&Batch::sequence(&[4], 3, 0))
    });
    if let Err(error) = &result {
        let error = error.to_string();
        assert!(!error.is_empty() && error.len() < 2000, "{what}: {error}");
    }
    assert!(start.elapsed() < HANG_GUARD, "{what} takes long");
    result.is_ok()
}

#[test]
fn single_mutations_are_errors_or_loadable_models() {
    let all_of_them = std::env::var_os("SAMITE_TEST_ALL_MUTATIONS").is_some();
    let (mut refused, mut all) = (0, 0);
    for (number, architecture) in ARCHITECTURES.iter().enumerate() {
        let name = architecture.name;
        let file = TestModel::tiny(name);
        let parts = GraphContext::read(&file.path);
        assert!(try_out(parts.encode(&parts.metadata, None), name));
        let mut count = |works: bool| {
            all += 1;
            refused += usize::from(!works);
        };
        let keys = parts.metadata.iter();
        let keys = keys.filter(|(key, _)| key.starts_with(name));
        let mut nth = number;
        for (key, value) in keys {
            for hostile in hostile(value) {
                // A different subset for each architecture; all values take some minutes.
                nth += 1;
                if !all_of_them && nth % 8 > 0 {
                    continue;
                }
                let mut metadata = parts.metadata.clone();
                let what = format!("{name}: {key} = {hostile:?}");
                metadata.set(key, hostile).unwrap();
                count(try_out(parts.encode(&metadata, None), &what));
            }
            let mut metadata = parts.metadata.clone();
            metadata.remove(key);
            let what = format!("{name} without {key}");
            count(try_out(parts.encode(&metadata, None), &what));
        }
        let step = if all_of_them { 1 } else { 4 };
        for skipped in (number % step..parts.tensors.len()).step_by(step) {
            let what = format!("{name} without {}", parts.tensors[skipped].0.name());
            count(try_out(parts.encode(&parts.metadata, Some(skipped)), &what));
        }
    }
    assert!(all > 3000 && refused > all / 3, "{refused} of {all}");
}
