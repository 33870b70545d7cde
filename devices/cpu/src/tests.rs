//! Tests of whole runs: errors, cancellation, observation, threads.

use crate::harness::*;
use crate::{CpuBackend, CpuDevice, CpuOptions, IsaLevel, Pool};
use samite_core::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Returns a graph whose phases are large enough to be shared: mul_mat, softmax, attention.
fn large() -> (Graph, [TensorId; 2], TensorId) {
    let mut g = Graph::new();
    let weights = input(&mut g, &[256, 256]);
    let x = input(&mut g, &[256, 40]);
    let half = g.cast(weights, DType::F16).unwrap();
    let quantized = g.cast(weights, DType::Q8_0).unwrap();
    let a = g.mul_mat(half, x).unwrap();
    let b = g.mul_mat(quantized, a).unwrap();
    let c = g.soft_max(b, None, None, 0.1, 0.0).unwrap();
    let heads = g.reshape(c, [32, 8, 40, 1]).unwrap();
    let heads = g.permute(heads, [0, 2, 1, 3]).unwrap();
    let d = g
        .flash_attn([heads, heads, heads], None, None, 0.2)
        .unwrap();
    let e = g.rms_norm(d, 1e-5).unwrap();
    let out = g.unary(e, Unary::Silu).unwrap();
    (g, [weights, x], out)
}

#[test]
fn results_do_not_depend_on_the_device_thread_count() {
    let (g, [weights, x], out) = large();
    let outcome = |device: &std::sync::Arc<CpuDevice>| {
        let mut bench = Bench::new(&g, device).unwrap();
        bench.write(weights, &numbers(1, 256 * 256));
        bench.write(x, &numbers(2, 256 * 40));
        bench.run().unwrap();
        let first = bench.read::<f32>(out);
        bench.run().unwrap();
        assert_eq!(first, bench.read::<f32>(out));
        first
    };
    let one = outcome(&device(1));
    assert!(one.iter().all(|x| x.is_finite()));
    for threads in [2, 3, 4] {
        assert_eq!(one, outcome(&device(threads)));
    }
    for isa in [IsaLevel::Generic, IsaLevel::Avx2] {
        let other = outcome(&CpuDevice::new(CpuOptions::default().with_isa(isa)));
        let error: f32 = one.iter().zip(&other).map(|(a, b)| (a - b) * (a - b)).sum();
        let power: f32 = one.iter().map(|a| a * a).sum();
        assert!(error / power < 1e-4, "{isa:?}: {}", error / power);
    }
}

#[test]
fn results_do_not_depend_on_the_stream_thread_count() {
    let (g, [weights, x], out) = large();
    let device = device(4);
    let mut bench = Bench::new(&g, &device).unwrap();
    bench.write(weights, &numbers(1, 256 * 256));
    bench.write(x, &numbers(2, 256 * 40));
    bench.run().unwrap();
    let all = bench.read::<f32>(out);
    for threads in [Some(1), Some(3), Some(0), Some(2), Some(100), None] {
        bench.write(weights, &numbers(3, 256 * 256));
        bench.run().unwrap();
        assert_ne!(all, bench.read::<f32>(out));
        bench.write(weights, &numbers(1, 256 * 256));
        bench.set_threads(threads);
        bench.run().unwrap();
        assert_eq!(all, bench.read::<f32>(out), "{threads:?}");
    }
}

#[test]
fn devices_share_a_pool_with_different_thread_counts() {
    let (g, [weights, x], out) = large();
    let pool = Arc::new(Pool::new(4, 2));
    let options = CpuOptions::default().with_pool(Arc::clone(&pool));
    let whole = CpuDevice::with_name("whole", options.clone());
    let part = CpuDevice::with_name("part", options.clone().with_threads(2));
    let more = CpuDevice::with_name("more", options.with_threads(9));
    assert_eq!([&whole, &part, &more].map(|d| d.threads()), [4, 2, 4]);
    assert!(Arc::ptr_eq(whole.pool(), part.pool()));
    let outcome = |device: &Arc<CpuDevice>, threads| {
        let mut bench = Bench::new(&g, device).unwrap();
        bench.set_threads(threads);
        bench.write(weights, &numbers(1, 256 * 256));
        bench.write(x, &numbers(2, 256 * 40));
        (0..4).for_each(|_| bench.run().unwrap());
        bench.read::<f32>(out)
    };
    let alone = outcome(&device(1), None);
    std::thread::scope(|scope| {
        for device in [&whole, &part, &more] {
            let (outcome, alone) = (&outcome, &alone);
            scope.spawn(move || assert!(*alone == outcome(device, Some(3))));
        }
        pool.pause();
    });
    assert!(alone == outcome(&whole, None));
    pool.resume();
    assert!(alone == outcome(&whole, None));
}

#[test]
fn streams_of_one_device_run_concurrently() {
    let (g, [weights, x], out) = large();
    let device = device(2);
    let results: Vec<Vec<f32>> = std::thread::scope(|scope| {
        let runs: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut bench = Bench::new(&g, &device).unwrap();
                    bench.write(weights, &numbers(1, 256 * 256));
                    bench.write(x, &numbers(2, 256 * 40));
                    (0..5).for_each(|_| bench.run().unwrap());
                    bench.read(out)
                })
            })
            .collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0], results[2]);
}

#[test]
fn cancelled_work_stops_and_can_run_again() {
    let (g, ..) = large();
    for threads in [1, 2] {
        let mut bench = Bench::new(&g, &device(threads)).unwrap();
        let cancel = CancelToken::new();
        cancel.cancel();
        let control = RunControl {
            cancel: &cancel,
            observer: None,
        };
        assert!(matches!(bench.run_with(control), Err(Error::Cancelled)));
        cancel.reset();
        bench.run_with(control).unwrap();
    }
}

/// Cancelling a run does not wait for the end of a long node.
#[test]
fn long_nodes_check_for_cancellation() {
    let mut product = Graph::new();
    let weights = input(&mut product, &[2048, 1024]);
    let x = input(&mut product, &[2048, 1024]);
    product.mul_mat(weights, x).unwrap();
    // So large a kernel is multiplied element by element.
    let mut convolution = Graph::new();
    let kernel = input(&mut convolution, &[1025, 1024]);
    let image = input(&mut convolution, &[1032, 1087]);
    let window = Window::default();
    convolution
        .push(Op::Conv2d { window }, &[Some(kernel), Some(image)])
        .unwrap();
    for g in [product, convolution] {
        for threads in [1, 2] {
            let mut bench = Bench::new(&g, &device(threads)).unwrap();
            let looks = AtomicUsize::new(0);
            let cancel = CancelToken::asking(move || looks.fetch_add(1, Ordering::Relaxed) == 1);
            let control = RunControl {
                cancel: &cancel,
                observer: None,
            };
            assert!(matches!(bench.run_with(control), Err(Error::Cancelled)));
        }
    }
}

#[derive(Default)]
struct Watcher(Mutex<Vec<(TensorId, Duration, Duration)>>);

impl RunObserver for Watcher {
    fn ran(&self, node: TensorId, start: Duration, took: Duration) {
        self.0.lock().unwrap().push((node, start, start + took));
    }
}

#[test]
fn observers_see_every_computed_node_in_order() {
    let (g, ..) = large();
    let computed: Vec<_> = g.ids().filter(|&id| g.tensor(id).is_computed()).collect();
    for threads in [1, 2] {
        let mut bench = Bench::new(&g, &device(threads)).unwrap();
        let watcher = Arc::new(Watcher::default());
        let observer: Arc<dyn RunObserver> = Arc::clone(&watcher) as _;
        bench
            .run_with(RunControl {
                cancel: &CancelToken::new(),
                observer: Some(&observer),
            })
            .unwrap();
        let seen = watcher.0.lock().unwrap();
        assert!(seen.iter().map(|(id, ..)| *id).eq(computed.iter().copied()));
        assert!(seen.iter().all(|(_, start, end)| start <= end));
        assert!(seen.windows(2).all(|w| w[0].2 <= w[1].1));
    }
}

#[test]
fn an_observer_that_panics_is_an_error() {
    struct Panics;
    impl RunObserver for Panics {
        fn ran(&self, _: TensorId, _: Duration, _: Duration) {
            panic!("expected");
        }
    }
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (g, ..) = large();
        for threads in [1, 3] {
            let mut bench = Bench::new(&g, &device(threads)).unwrap();
            let cancel = CancelToken::new();
            let control = |observer| RunControl {
                cancel: &cancel,
                observer,
            };
            let panics: Arc<dyn RunObserver> = Arc::new(Panics);
            let error = bench.run_with(control(Some(&panics))).unwrap_err();
            assert!(matches!(error, Error::Device { .. }), "{error}");
            bench.run_with(control(None)).unwrap();
        }
        done.send(()).unwrap();
    });
    is_done
        .recv_timeout(std::time::Duration::from_secs(60))
        .expect("workers wait for one whose observer panicked");
}

#[test]
fn bad_row_indices_are_errors_that_name_them() {
    for bad in [4, -1, -2, i32::MIN, i32::MAX] {
        let mut g = Graph::new();
        let table = input(&mut g, &[32, 4]);
        let numbers = integers(&mut g, &[3]);
        let rows = g.get_rows(table, numbers).unwrap();
        g.set_name(rows, "embedding");
        let mut bench = Bench::new(&g, &device(1)).unwrap();
        bench.write(numbers, &[0, 3, bad]);
        let message = bench.run().unwrap_err().to_string();
        for part in [
            "cpu",
            "get_rows",
            "embedding",
            "element 2",
            &bad.to_string(),
            "4 possible",
        ] {
            assert!(message.contains(part), "{part}: {message}");
        }
        bench.write(numbers, &[0, 3, 1]);
        bench.run().unwrap();

        let mut g = Graph::new();
        let cache = input(&mut g, &[32, 4]);
        let row = input(&mut g, &[32, 1]);
        let numbers = integers(&mut g, &[1]);
        g.set_rows(row, numbers, cache).unwrap();
        let mut bench = Bench::new(&g, &device(1)).unwrap();
        bench.write(numbers, &[bad]);
        assert!(bench.run().unwrap_err().to_string().contains("set_rows"));

        if bad == -1 {
            continue; // selects no expert
        }
        let mut g = Graph::new();
        let experts = input(&mut g, &[32, 8, 4]);
        let x = input(&mut g, &[32, 1, 5]);
        let ids = integers(&mut g, &[2, 5]);
        g.mul_mat_id(experts, x, ids).unwrap();
        let mut bench = Bench::new(&g, &device(2)).unwrap();
        bench.write(ids, &[0, 1, 2, 3, 0, 1, 2, bad, 0, 1]);
        let message = bench.run().unwrap_err().to_string();
        assert!(
            message.contains("mul_mat_id") && message.contains("element 7"),
            "{message}"
        );

        let mut g = Graph::new();
        let (a, b) = (input(&mut g, &[32, 2, 1]), input(&mut g, &[32, 4]));
        let ids = integers(&mut g, &[2, 1]);
        g.add_id(a, b, ids).unwrap();
        let mut bench = Bench::new(&g, &device(1)).unwrap();
        bench.write(ids, &[0, bad]);
        assert!(bench.run().unwrap_err().to_string().contains("add_id"));
    }
}

#[test]
fn the_backend_describes_itself() {
    let backend = CpuBackend::new(CpuOptions::default());
    let device = &backend.devices()[0];
    assert_eq!((backend.name(), device.name()), ("cpu", "cpu"));
    assert_eq!(device.kind(), DeviceKind::Cpu);
    assert!(backend.features().iter().any(|(key, _)| key == "isa"));
    assert!(device.memory().total.is_none_or(|total| total > 0));
    assert!(device.capabilities().import_host && !device.capabilities().asynchronous);
    assert!(device.supports_buffer_type(&host_buffer_type()));
}

#[test]
fn unsupported_nodes_have_reasons_and_are_refused() {
    let mut g = Graph::new();
    let row = g.leaf("row", DType::F32, [256, 1, 1, 1]).unwrap();
    let encoded = g.cast(row, DType::IQ1_S).unwrap();
    let device = device(1);
    let Support::No(reason) = device.supports(g.node(encoded)) else {
        panic!("iq1_s cannot be encoded");
    };
    assert!(reason.contains("iq1_s"));
    assert!(matches!(
        Bench::new(&g, &device),
        Err(Error::Unsupported { .. })
    ));
}

#[test]
fn read_only_memory_is_not_written_to() {
    let mut g = Graph::new();
    let x = input(&mut g, &[4]);
    let y = g.sqr(x).unwrap();
    static BYTES: [u64; 2] = [0; 2];
    let base = std::ptr::NonNull::from(&BYTES).cast();
    // SAFETY: a static lives forever, and is not written to.
    let memory = unsafe { HostMemory::borrow(base, 16, false, Box::new(())) };
    let buffer = host_buffer(memory, Usage::Weights);
    let place = TensorRef {
        buffer,
        slot: Slot {
            offset: 0,
            layout: g.tensor(x).layout,
        },
    };
    let places = [Some(place.clone()), Some(place)];
    let mut stream = device(1).open_stream().unwrap();
    let work = PlacedGraph {
        graph: &g,
        nodes: &[y],
        places: &places,
        workspace: None,
        compiled: None,
    };
    let Err(error) = stream.prepare(work) else {
        panic!("a result in read-only memory");
    };
    assert!(error.to_string().contains("read-only"), "{error}");
}

#[test]
fn scratch_size_does_not_depend_on_weight_allocation() {
    let device = CpuDevice::new(CpuOptions::default().with_threads(2));
    let packed = &device.extra_buffer_types()[0];
    let mut wants_some = false;
    for dtype in [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q4_0,
        DType::Q8_0,
        DType::Q6_K,
    ] {
        for columns in [1, 8, 40, 600] {
            let layout = Layout::contiguous(dtype, [512, 96, 1, 1]).unwrap();
            let info = TensorInfo::new("w", layout, Usage::Weights);
            let size = packed.alloc_size(&info).unwrap();
            let workspace = |buffer: Arc<dyn Buffer>| {
                let mut g = Graph::new();
                let w = StoredTensor::described(&info, buffer, 0).unwrap();
                let w = g.stored(&w).unwrap();
                let x = input(&mut g, &[512, columns]);
                let y = g.mul_mat(w, x).unwrap();
                device.workspace(&g, &[y]).unwrap()
            };
            let planned = workspace(unallocated(packed, size, Usage::Weights));
            let real = workspace(packed.allocate(size, Usage::Weights).unwrap());
            assert_eq!(planned, real, "{dtype}, {columns} columns");
            wants_some |= real > 0;
        }
    }
    assert!(wants_some);
}
