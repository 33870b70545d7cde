//! Tests of the device on any adapter; a software adapter suffices. Without any, the tests report
//! that they are skipped.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_core::{
    Backend, CancelToken, DType, Device, Error, Graph, Layout, Op, PlacedGraph, RunControl,
    StoredTensor, TensorGroup, TensorId, TensorRef, Usage,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_testing::{Case, Input, Limit, Outcome, Recipe, Rng, Suite, check_contract, run_case};
use samite_wgpu::{WgpuBackend, WgpuDevice};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

/// Opens the first adapter anew, with `parameters`.
fn device(parameters: &str) -> Option<Arc<dyn Device>> {
    let backend = WgpuBackend::default();
    let Some(device) = backend.devices().first() else {
        samite_testing::skipped("wgpu finds no adapter, not even a software one");
        return None;
    };
    let device = backend.configure(device, parameters.parse().unwrap());
    Some(device.unwrap())
}

#[test]
fn the_device_fulfils_the_contract() {
    for parameters in ["", "subgroups=off", "binding=1MiB"] {
        let Some(device) = device(parameters) else {
            return;
        };
        let report = check_contract(&device);
        assert_eq!(report.failures(), [], "{parameters}\n{report}");
        assert!(report.passed() >= 15, "{parameters}\n{report}");
    }
}

#[test]
fn compiled_kernels_are_cached_unless_modified() {
    let folder = tempfile::tempdir().unwrap();
    // Open the adapter anew, like another run of the program.
    let open = |parameters: &str| -> Option<Option<usize>> {
        let device = device(parameters)?;
        let own = device.as_any().downcast_ref::<WgpuDevice>().unwrap();
        if !parameters.contains("cache=off") {
            own.keep_pipelines_in(folder.path().to_owned());
        }
        drop(Arc::clone(&device).open_stream().unwrap());
        let mut bytes = [0; 4];
        let layout = Layout::contiguous(DType::I8, [5, 1, 1, 1]).unwrap();
        let memory = device.buffer_type();
        let group = TensorGroup::allocate(&memory, Usage::Any, &[("", layout)]).unwrap();
        // Part of a word, which a kernel writes.
        group.tensors[0].tensor().write(1, &[7]).unwrap();
        group.tensors[0].tensor().read(1, &mut bytes).unwrap();
        assert_eq!(bytes[0], 7);
        Some(own.found_pipelines())
    };
    let Some(first) = open("") else { return };
    if first.is_none() {
        samite_testing::skipped("the driver gives no compiled kernels out");
        return;
    }
    let files = || -> Vec<_> {
        let files = std::fs::read_dir(&folder).unwrap();
        let files = files.map(|file| file.unwrap().path());
        // The verdict of the self-test is another file.
        let is_pipelines = |path: &PathBuf| path.to_string_lossy().contains("wgpu-pipelines");
        files.filter(is_pipelines).collect()
    };
    assert_eq!((first, files().len()), (Some(0), 1));
    assert!(open("").unwrap().unwrap() > 0);
    let file = files().remove(0);
    let whole = std::fs::read(&file).unwrap();
    for at in [0, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        std::fs::write(&file, damaged).unwrap();
        assert_eq!(open(""), Some(Some(0)), "byte {at}");
        // A valid one has replaced it.
        assert!(open("").unwrap().unwrap() > 0);
    }
    assert_eq!(open("cache=off"), Some(None));
    assert_eq!(files().len(), 1);
}

/// Sizes are measured once for an adapter, cached, and do not change results.
#[test]
fn tuning_runs_once_and_does_not_change_results() {
    let folder = tempfile::tempdir().unwrap();
    let product = |parameters: &str| -> Option<Vec<f32>> {
        let device = device(parameters)?;
        let own = device.as_any().downcast_ref::<WgpuDevice>().unwrap();
        own.keep_pipelines_in(folder.path().to_owned());
        let (length, rows) = (288, 4200);
        let mut graph = Graph::new();
        let w = graph.leaf("w", DType::Q4_0, [length, rows, 1, 1]).unwrap();
        let x = graph.input("x", DType::F32, [length, 1, 1, 1]).unwrap();
        let y = graph.mul_mat(w, x).unwrap();
        let mut stream = Arc::clone(&device).open_stream().unwrap();
        let mut places = places(&device, &graph);
        let packed = &device.extra_buffer_types()[0];
        let wanted = [("w", graph.tensor(w).layout)];
        let group = TensorGroup::allocate(packed, Usage::Weights, &wanted).unwrap();
        places[w.index()] = Some(group.tensors[0].tensor().clone());
        let place = |id: TensorId| places[id.index()].as_ref().unwrap();
        let mut rng = Rng::new(3);
        for id in [w, x] {
            let bytes = Recipe::UNIT.bytes(&graph.tensor(id).layout, &mut rng);
            place(id).write(0, &bytes.unwrap()).unwrap();
        }
        let bytes = device.workspace(&graph, &[y]).unwrap();
        let layout = Layout::contiguous(DType::I8, [bytes, 1, 1, 1]).unwrap();
        let memory = device.buffer_type();
        let scratch = TensorGroup::allocate(&memory, Usage::Compute, &[("", layout)]).unwrap();
        let work = PlacedGraph {
            graph: &graph,
            nodes: &[y],
            places: &places,
            workspace: Some(scratch.tensors[0].tensor()),
            compiled: None,
        };
        let mut prepared = stream.prepare(work).unwrap();
        stream
            .run(&mut *prepared, control(&CancelToken::new()))
            .unwrap();
        let mut found = vec![0f32; rows];
        stream
            .read(place(y), 0, bytemuck::cast_slice_mut(&mut found))
            .unwrap();
        Some(found)
    };
    let kept = || -> Vec<String> {
        let files = std::fs::read_dir(&folder).unwrap();
        let files = files.map(|file| file.unwrap().path());
        let named = |path: &std::path::PathBuf| path.to_string_lossy().contains("-tuning-");
        let texts = files.filter(named).map(std::fs::read_to_string);
        texts.collect::<Result<_, _>>().unwrap()
    };
    let Some(expected) = product("tuning=off") else {
        return;
    };
    assert!(expected.iter().any(|x| x.abs() > 0.5));
    // A software adapter is only measured on request.
    let _ = product("");
    assert_eq!(kept().len(), 0);
    assert_eq!(product("tuning=on").unwrap(), expected);
    let measured = kept();
    assert_eq!(measured.len(), 1);
    assert!(measured[0].contains("\nrows: "), "{measured:?}");
    assert_eq!(product("tuning=on").unwrap(), expected);
    assert_eq!(kept(), measured);
    for rows in [1, 2, 4, 8] {
        assert_eq!(
            product(&format!("rows={rows}")).unwrap(),
            expected,
            "{rows}"
        );
    }
}

/// Returns whether the device may reject an operation for this reason.
fn may_lack(reason: &str) -> bool {
    let known = [
        "is encoded on the host only",
        "cannot be written",
        "cannot be read",
        "tokens have several positions",
        "with gaps between them",
        "there is no kernel for it",
    ];
    known.iter().any(|known| reason.contains(known))
}

/// The reference device computes every case once for all tests, which run in parallel.
static SUITE: LazyLock<Suite> = LazyLock::new(Suite::new);

/// Runs all cases on a device with these parameters. `small` is set if they limit bindings to less
/// than the size of some operands.
fn check_against_the_reference(parameters: &str, small: bool) {
    let Some(device) = device(parameters) else {
        return;
    };
    let report = SUITE.run(&device);
    assert!(report.is_success(), "{parameters}\n{report}");
    let least = if small { 6000 } else { 6200 };
    assert!(report.passed() >= least, "{parameters}\n{report}");
    let mut reasons = report.ops.values().flat_map(|counts| counts.reasons.keys());
    let other = reasons
        .find(|reason| !(may_lack(reason) || small && reason.contains("limit of one binding")));
    assert_eq!(other, None, "{parameters}\n{report}");
}

#[test]
fn the_device_matches_the_reference() {
    check_against_the_reference("", false);
}

#[test]
fn the_device_matches_the_reference_without_subgroups() {
    check_against_the_reference("subgroups=off", false);
}

#[test]
fn the_device_matches_the_reference_with_small_bindings() {
    check_against_the_reference("binding=64KiB", true);
}

/// Allocates memory for every tensor of `graph`.
fn places(device: &Arc<dyn Device>, graph: &Graph) -> Vec<Option<TensorRef>> {
    let place = |id: TensorId| {
        let wanted = [("", graph.tensor(id).layout)];
        let group = TensorGroup::allocate(&device.buffer_type(), Usage::Compute, &wanted).unwrap();
        Some(group.tensors[0].tensor().clone())
    };
    graph.ids().map(place).collect()
}

fn control(cancel: &CancelToken) -> RunControl<'_> {
    RunControl {
        cancel,
        observer: None,
    }
}

#[test]
fn unaligned_bytes_are_written_and_read() {
    let Some(device) = device("") else { return };
    let len = 1000;
    let layout = Layout::contiguous(DType::I8, [len, 1, 1, 1]).unwrap();
    let memory = device.buffer_type();
    let group = TensorGroup::allocate(&memory, Usage::Any, &[("bytes", layout)]).unwrap();
    let tensor: &StoredTensor = &group.tensors[0];
    let mut expected = vec![0u8; len];
    let mut rng = Rng::new(7);
    for step in 0..400 {
        let start = rng.below(len);
        let end = start + rng.below((len - start).min(40)) + 1;
        let value = step as u8 | 1;
        expected[start..end].fill(value);
        match step % 3 {
            0 => {
                let TensorRef { buffer, slot } = tensor.tensor();
                buffer.fill(*slot, start, end - start, value).unwrap();
            }
            _ => tensor.tensor().write(start, &expected[start..end]).unwrap(),
        }
        let mut found = vec![0; end - start];
        tensor.tensor().read(start, &mut found).unwrap();
        assert_eq!(found, expected[start..end], "step {step}");
    }
    let mut found = vec![0; len];
    tensor.tensor().read(0, &mut found).unwrap();
    assert_eq!(found, expected);
}

#[test]
fn an_invalid_row_index_error_names_the_node() {
    let Some(device) = device("") else { return };
    let mut graph = Graph::new();
    let table = graph.leaf("table", DType::F32, [4, 3, 1, 1]).unwrap();
    let numbers = graph.input("numbers", DType::I32, [2, 1, 1, 1]).unwrap();
    let rows = graph.get_rows(table, numbers).unwrap();
    graph.set_name(rows, "looked up");
    let other = graph.sqr(rows).unwrap();
    let places = places(&device, &graph);
    let place = |id: TensorId| places[id.index()].as_ref().unwrap();
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    let nodes = [rows, other];
    let mut prepared = stream
        .prepare(PlacedGraph {
            graph: &graph,
            nodes: &nodes,
            places: &places,
            workspace: None,
            compiled: None,
        })
        .unwrap();
    let cancel = CancelToken::new();
    let values: Vec<f32> = (0..12).map(|x| x as f32).collect();
    place(table)
        .write(0, bytemuck::cast_slice(&values))
        .unwrap();
    for (wrong, event) in [(3i32, false), (-1, false), (i32::MIN, true)] {
        place(numbers)
            .write(0, bytemuck::cast_slice(&[1, wrong]))
            .unwrap();
        stream.run(&mut *prepared, control(&cancel)).unwrap();
        let result = if event {
            let event = device.create_event().unwrap();
            stream.record(&*event).unwrap();
            event.synchronize()
        } else {
            stream.synchronize()
        };
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("looked up") && error.contains("get_rows"),
            "{error}"
        );
        // The error is reported once, and later work is unaffected.
        place(numbers)
            .write(0, bytemuck::cast_slice(&[2, 0]))
            .unwrap();
        stream.run(&mut *prepared, control(&cancel)).unwrap();
        stream.synchronize().unwrap();
        let mut found = [0.0f32; 8];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut found);
        stream.read(place(other), 0, bytes).unwrap();
        assert_eq!(found, [64.0, 81.0, 100.0, 121.0, 0.0, 1.0, 4.0, 9.0]);
    }
}

/// A table above the binding limit is processed in parts, and none of them mistakes another part's
/// rows for invalid ones.
#[test]
fn indices_into_split_tables_are_checked_against_the_whole_table() {
    let Some(device) = device("binding=64KiB") else {
        return;
    };
    let mut graph = Graph::new();
    let table = graph.leaf("table", DType::F32, [256, 300, 1, 1]).unwrap();
    let numbers = graph.input("numbers", DType::I32, [3, 1, 1, 1]).unwrap();
    let rows = graph.get_rows(table, numbers).unwrap();
    let places = places(&device, &graph);
    let place = |id: TensorId| places[id.index()].as_ref().unwrap();
    let values: Vec<f32> = (0..256 * 300).map(|x| x as f32).collect();
    place(table)
        .write(0, bytemuck::cast_slice(&values))
        .unwrap();
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    let mut prepared = stream
        .prepare(PlacedGraph {
            graph: &graph,
            nodes: &[rows],
            places: &places,
            workspace: None,
            compiled: None,
        })
        .unwrap();
    for (last, is_wrong) in [(299i32, false), (300, true)] {
        place(numbers)
            .write(0, bytemuck::cast_slice(&[0, 150, last]))
            .unwrap();
        stream
            .run(&mut *prepared, control(&CancelToken::new()))
            .unwrap();
        assert_eq!(stream.synchronize().is_err(), is_wrong, "row {last}");
    }
    let mut found = vec![0.0f32; 512];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut found);
    place(rows).read(0, bytes).unwrap();
    assert_eq!((found[0], found[256]), (0.0, 150.0 * 256.0));
}

#[test]
fn every_call_on_a_lost_device_reports_the_loss() {
    let Some(device) = device("") else { return };
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [64, 1, 1, 1]).unwrap();
    let y = graph.sqr(x).unwrap();
    let places = places(&device, &graph);
    let place = |id: TensorId| places[id.index()].as_ref().unwrap();
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    let work = || PlacedGraph {
        graph: &graph,
        nodes: std::slice::from_ref(&y),
        places: &places,
        workspace: None,
        compiled: None,
    };
    let mut prepared = stream.prepare(work()).unwrap();
    let event = device.create_event().unwrap();
    let cancel = CancelToken::new();
    stream.run(&mut *prepared, control(&cancel)).unwrap();
    stream.record(&*event).unwrap();
    device
        .as_any()
        .downcast_ref::<WgpuDevice>()
        .unwrap()
        .destroy()
        .unwrap();
    let memory = device.buffer_type();
    let results = [
        ("run", stream.run(&mut *prepared, control(&cancel))),
        ("synchronize", stream.synchronize()),
        ("prepare", stream.prepare(work()).map(drop)),
        ("write", place(x).write(0, &[0; 256])),
        ("write of a part of a word", place(x).write(1, &[0; 2])),
        ("read", place(y).read(0, &mut [0; 256])),
        (
            "read by the stream",
            stream.read(place(y), 0, &mut [0; 256]),
        ),
        ("copy", stream.copy(place(x), place(y))),
        ("record", stream.record(&*event)),
        ("event", event.synchronize()),
        ("allocate", memory.allocate(64, Usage::Any).map(drop)),
        ("open", Arc::clone(&device).open_stream().map(drop)),
    ];
    for (what, result) in results {
        assert!(
            matches!(result, Err(Error::DeviceLost { .. })),
            "{what}: {result:?}"
        );
    }
}

#[test]
fn oversized_allocations_are_out_of_memory() {
    let Some(device) = device("") else { return };
    let memory = device.buffer_type();
    assert!(memory.max_size() >= 128 << 20);
    for size in [memory.max_size() + 1, usize::MAX] {
        let result = memory.allocate(size, Usage::Any);
        assert!(matches!(result, Err(Error::OutOfMemory { .. })), "{size}");
    }
}

/// Long caches with few queries are split among workgroups.
#[test]
fn attention_over_long_caches_is_split_and_merged() {
    let Some(device) = device("") else { return };
    let reference: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions::default());
    for (kv_type, keys, tokens, max_bias, has_sinks) in [
        (DType::F32, 600, 1, 0.0, false),
        (DType::F16, 1100, 2, 8.0, true),
        (DType::Q8_0, 513, 1, 0.0, true),
    ] {
        let mut graph = Graph::new();
        let mut inputs = Vec::new();
        let mut input = |graph: &mut Graph, dtype, shape, recipe| {
            let tensor = graph.input("", dtype, shape).unwrap();
            inputs.push(Input {
                tensor,
                recipe,
                weights: false,
            });
            Some(tensor)
        };
        let unit = Recipe::UNIT;
        let mut sources = vec![
            input(&mut graph, DType::F32, [64, tokens, 4, 1], unit),
            input(&mut graph, kv_type, [64, keys, 2, 1], unit),
            input(&mut graph, kv_type, [64, keys, 2, 1], unit),
            input(&mut graph, DType::F16, [keys, tokens, 1, 1], Recipe::Mask),
        ];
        if has_sinks {
            sources.push(input(&mut graph, DType::F32, [4, 1, 1, 1], unit));
        }
        let op = samite_core::Op::FlashAttn {
            scale: 0.125,
            max_bias,
            softcap: 0.0,
            precision: samite_core::Precision::F32,
        };
        let output = graph.push(op, &sources).unwrap();
        let case = Case {
            name: format!("{kv_type}, {keys} keys"),
            op: op.name(),
            graph,
            inputs,
            output,
            limit: Limit::Nmse(1e-9),
            in_place: None,
        };
        let outcome = run_case(&device, &reference, &case);
        assert!(
            matches!(outcome, Outcome::Passed { .. }),
            "{}: {outcome:?}",
            case.name
        );
        assert!(
            device.workspace(&case.graph, &[output]).unwrap() > 0,
            "{}",
            case.name
        );
    }
}

/// Rows too long for one workgroup, and experts too large for one binding.
#[test]
fn long_rows_and_large_experts_are_split() {
    let Some(whole) = device("") else { return };
    let Some(small) = device("binding=64KiB") else {
        return;
    };
    let reference: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions::default());
    let f32 = |shape| (DType::F32, shape, Recipe::UNIT);
    let ties = |shape| (DType::F32, shape, Recipe::Ties);
    let experts = |slots, tokens| {
        let recipe = Recipe::DistinctIds { limit: 7 };
        (DType::I32, [slots, tokens, 1, 1], recipe)
    };
    let product = || Op::MulMatId {
        precision: samite_core::Precision::F32,
    };
    let nmse = Limit::Nmse(1e-9);
    let cases = [
        (&whole, Op::Sum, vec![f32([9000, 7, 1, 1])], nmse, 2),
        (&whole, Op::Sum, vec![f32([8192, 1, 1, 1])], nmse, 1),
        (
            &whole,
            Op::CrossEntropyLoss,
            vec![f32([700, 9, 1, 1]); 2],
            nmse,
            2,
        ),
        (
            &whole,
            Op::ArgMax,
            vec![ties([20_000, 3, 1, 1])],
            Limit::Exact,
            2,
        ),
        (
            &whole,
            Op::ArgMax,
            vec![f32([151_936, 2, 1, 1])],
            Limit::Exact,
            2,
        ),
        (
            &whole,
            Op::TopK { k: 40 },
            vec![f32([32_001, 2, 1, 1])],
            Limit::Exact,
            2,
        ),
        (
            &whole,
            Op::TopK { k: 5 },
            vec![ties([6000, 3, 2, 1])],
            Limit::Exact,
            2,
        ),
        // The last piece has fewer elements than requested.
        (
            &whole,
            Op::TopK { k: 40 },
            vec![f32([5121, 1, 1, 1])],
            Limit::Exact,
            2,
        ),
        // A binding holds half of each expert, and at most three of all experts.
        (
            &small,
            product(),
            vec![
                (DType::F16, [256, 250, 7, 1], Recipe::UNIT),
                f32([256, 2, 3, 1]),
                experts(2, 3),
            ],
            nmse,
            14,
        ),
        (
            &small,
            product(),
            vec![
                (DType::F16, [64, 150, 7, 1], Recipe::UNIT),
                f32([64, 2, 20, 1]),
                experts(2, 20),
            ],
            nmse,
            4,
        ),
    ];
    for (device, op, sources, limit, launches) in cases {
        let mut graph = Graph::new();
        let mut inputs = Vec::new();
        let mut ids = Vec::new();
        for (dtype, shape, recipe) in sources {
            let tensor = graph.input("", dtype, shape).unwrap();
            inputs.push(Input {
                tensor,
                recipe,
                weights: false,
            });
            ids.push(Some(tensor));
        }
        let name = op.name();
        let output = graph.push(op, &ids).unwrap();
        let case = Case {
            name: name.to_owned(),
            op: name,
            graph,
            inputs,
            output,
            limit,
            in_place: None,
        };
        let outcome = run_case(device, &reference, &case);
        assert!(
            matches!(outcome, Outcome::Passed { .. }),
            "{name}: {outcome:?}"
        );
        let own = device.as_any().downcast_ref::<WgpuDevice>().unwrap();
        let found = own.launch_count(&case.graph, &[output]).unwrap();
        assert_eq!(found, launches, "{name}");
    }
}

/// Attention quantizes its results to 8 bits for the following product: the bits equal those of
/// separate launches.
#[test]
fn attention_quantizes_columns_for_the_next_product() {
    for parameters in ["", "subgroups=off,overlaps=off"] {
        let Some(device) = device(parameters) else {
            return;
        };
        for (tokens, keys, kv_type) in [
            (3, 40, DType::F16),
            (1, 1100, DType::F16),
            (2, 600, DType::F32),
            (8, 40, DType::Q8_0),
        ] {
            let mut graph = Graph::new();
            let mut input = |dtype, shape| graph.input("", dtype, shape).unwrap();
            let q = input(DType::F32, [64, tokens, 4, 1]);
            let [k, v] = [0, 1].map(|_| input(kv_type, [64, keys, 2, 1]));
            let w = graph.leaf("w", DType::Q8_0, [256, 96, 1, 1]).unwrap();
            let op = Op::FlashAttn {
                scale: 0.125,
                max_bias: 0.0,
                softcap: 0.0,
                precision: samite_core::Precision::F32,
            };
            let attention = graph.push(op, &[Some(q), Some(k), Some(v)]).unwrap();
            let columns = graph.reshape(attention, [256, tokens, 1, 1]).unwrap();
            let product = graph.mul_mat(w, columns).unwrap();
            let mut places = places(&device, &graph);
            let packed = &device.extra_buffer_types()[0];
            let wanted = [("w", graph.tensor(w).layout)];
            let group = TensorGroup::allocate(packed, Usage::Weights, &wanted).unwrap();
            places[w.index()] = Some(group.tensors[0].tensor().clone());
            let base = places[attention.index()].clone().unwrap();
            let mut view = base;
            view.slot.layout = graph.tensor(columns).layout;
            places[columns.index()] = Some(view);
            let place = |id: TensorId| places[id.index()].as_ref().unwrap();
            let mut rng = Rng::new(3);
            for id in [q, k, v, w] {
                let layout = graph.tensor(id).layout;
                let bytes = Recipe::UNIT.bytes(&layout, &mut rng).unwrap();
                place(id).write(0, &bytes).unwrap();
            }
            let nodes = [attention, product];
            let run = |parts: &[&[TensorId]]| {
                let mut stream = Arc::clone(&device).open_stream().unwrap();
                for nodes in parts {
                    let bytes = device.workspace(&graph, nodes).unwrap();
                    let layout = Layout::contiguous(DType::I8, [bytes.max(4), 1, 1, 1]).unwrap();
                    let memory = device.buffer_type();
                    let wanted = [("", layout)];
                    let group = TensorGroup::allocate(&memory, Usage::Compute, &wanted).unwrap();
                    let work = PlacedGraph {
                        graph: &graph,
                        nodes,
                        places: &places,
                        workspace: Some(group.tensors[0].tensor()),
                        compiled: None,
                    };
                    let mut prepared = stream.prepare(work).unwrap();
                    stream
                        .run(&mut *prepared, control(&CancelToken::new()))
                        .unwrap();
                    stream.synchronize().unwrap();
                }
                let mut found = vec![0f32; 96 * tokens];
                let bytes = bytemuck::cast_slice_mut(&mut found);
                stream.read(place(product), 0, bytes).unwrap();
                found
            };
            let apart = run(&[&nodes[..1], &nodes[1..]]);
            place(product).write(0, &vec![0; 4 * 96 * tokens]).unwrap();
            assert_eq!(
                run(&[&nodes]),
                apart,
                "{kv_type}, {tokens} tokens, {keys} keys"
            );
            assert!(apart.iter().any(|x| x.abs() > 0.1), "{apart:?}");
        }
    }
}

#[test]
fn limits_are_measured() {
    let Some(device) = device("") else { return };
    let limits = device.limits().unwrap().unwrap();
    // From an old phone's speed to one that no machine reaches.
    assert!((1e8..1e14).contains(&limits.read_bytes), "{limits:?}");
    assert!((1e8..1e16).contains(&limits.f32_operations), "{limits:?}");
    println!("{limits:?}");
}
