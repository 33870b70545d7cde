//! The steady state: a decode step builds nothing, plans nothing and allocates nothing.
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests do

#[path = "all/common/mod.rs"]
mod common;

use common::*;
use samite_core::Backend;
use samite_cpu::{CpuBackend, CpuOptions};
use samite_llm::{Batch, ContextOptions};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts allocations of all threads.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// Only one test, because others would allocate in between.
#[test]
fn a_decode_step_allocates_nothing() {
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    std::hint::black_box(vec![1u8; 100]);
    assert!(
        ALLOCATIONS.load(Ordering::SeqCst) > before,
        "the counter does not count"
    );
    for architecture in ARCHITECTURES {
        for threads in [1, 2] {
            check_that_decoding_allocates_nothing(architecture, threads);
        }
    }
}

/// Decodes token by token. Attention reads the cache in steps of 32 cells: at each step, a graph
/// with another shape is planned and bound. Other tokens do no additional work.
fn check_that_decoding_allocates_nothing(architecture: &'static str, threads: usize) {
    let file = TestModel::tiny(architecture);
    let backend = CpuBackend::new(CpuOptions::default().with_threads(threads));
    let model = file.load(backend.devices().to_vec(), "");
    let mut context = context(
        &model,
        ContextOptions {
            n_ctx: Some(128),
            ..ContextOptions::default()
        },
    );
    context.decode(&Batch::sequence(&tokens(10), 0, 0)).unwrap();
    let mut batch = Batch::new();
    let mut quiet = 0;
    for position in 10..100 {
        batch.clear();
        batch.add(7, position, &[0], true);
        let (counters, before) = (
            context.scheduler().counters(),
            ALLOCATIONS.load(Ordering::SeqCst),
        );
        context.decode(&batch).unwrap();
        let allocations = ALLOCATIONS.load(Ordering::SeqCst) - before;
        assert!(context.logits(0).unwrap()[0].is_finite());
        let after = context.scheduler().counters();
        let new = after.plans - counters.plans;
        assert_eq!(after.runs, counters.runs + 1);
        assert_eq!(
            (after.buffers, after.compiled),
            (counters.buffers, counters.compiled)
        );
        if position == 10 || position % 32 == 0 {
            assert_eq!(new, 1, "{architecture}: position {position}");
            continue;
        }
        // The first steps fill reused buffers of the context.
        if position < 14 {
            continue;
        }
        assert_eq!(allocations, 0, "{architecture}: position {position}");
        assert_eq!((new, after.prepared), (0, counters.prepared));
        quiet += 1;
    }
    assert!(quiet > 80);
}
