//! The steady state: a decode step builds nothing, plans nothing and allocates nothing.
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests do

mod common;

use common::*;
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

// One test only: others would allocate in between.
#[test]
fn a_decode_step_allocates_nothing() {
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    std::hint::black_box(vec![1u8; 100]);
    assert!(
        ALLOCATIONS.load(Ordering::SeqCst) > before,
        "the counter does not count"
    );
    for architecture in ARCHITECTURES {
        let file = TestModel::tiny(architecture);
        let model = file.load(vec![cpu()], "");
        let mut context = context(
            &model,
            ContextOptions {
                n_ctx: Some(64),
                ..ContextOptions::default()
            },
        );
        context.decode(&Batch::sequence(&tokens(10), 0, 0)).unwrap();
        let mut batch = Batch::new();
        let mut step = |context: &mut samite_llm::Context, position: i32| {
            batch.clear();
            batch.add(7, position, &[0], true);
            context.decode(&batch).unwrap();
            assert!(context.logits(0).unwrap()[0].is_finite());
        };
        (10..14).for_each(|position| step(&mut context, position));
        let (counters, before) = (
            context.scheduler().counters(),
            ALLOCATIONS.load(Ordering::SeqCst),
        );
        (14..31).for_each(|position| step(&mut context, position));
        let allocations = ALLOCATIONS.load(Ordering::SeqCst) - before;
        let after = context.scheduler().counters();
        assert_eq!(allocations, 0, "{architecture}");
        assert_eq!(
            (after.plans, after.buffers, after.prepared),
            (counters.plans, counters.buffers, counters.prepared)
        );
        assert_eq!(after.runs, counters.runs + 17);
    }
}
