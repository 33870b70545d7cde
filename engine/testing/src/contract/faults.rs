//! Errors for mistakes of the caller and lack of memory.

use super::bench::{Bench, Check, N, Named, control, ensure, matrix};
use samite_core::{CancelToken, DType, Error, Layout, Slot, TensorGroup, TensorRef, Usage};
use std::sync::Arc;

pub(super) const CHECKS: &[Named] = &[
    ("accesses are checked", accesses_are_checked),
    ("too much memory", too_much_memory),
    ("foreign work", foreign_work),
    ("overlapping places", overlapping_places),
];

fn accesses_are_checked(bench: &Bench) -> Check {
    let tensor = bench.tensor(&bench.device.buffer_type())?;
    let len = tensor.layout().bytes();
    let outside = Slot {
        offset: tensor.buffer.size(),
        layout: *tensor.layout(),
    };
    let buffer = &tensor.buffer;
    let mistakes = [
        ("a write behind the end", tensor.write(len - 1, &[0; 2])),
        ("a write that overflows", tensor.write(usize::MAX, &[0; 2])),
        ("a read behind the end", tensor.read(len, &mut [0])),
        (
            "a write outside of the buffer",
            buffer.write(outside, 0, &[0; 4]),
        ),
        (
            "a read outside of the buffer",
            buffer.read(outside, 0, &mut [0; 4]),
        ),
        (
            "a fill outside of the buffer",
            buffer.fill(outside, 0, 4, 1),
        ),
    ];
    for (what, result) in mistakes {
        ensure(result.is_err(), format!("{what} is no error"))?;
    }
    Ok(())
}

fn too_much_memory(bench: &Bench) -> Check {
    let memory = bench.device.buffer_type();
    let result = memory.allocate(isize::MAX as usize / 2, Usage::Any);
    ensure(
        matches!(result, Err(Error::OutOfMemory { .. })),
        "asking for four exabytes is not an out-of-memory error",
    )
}

fn foreign_work(bench: &Bench) -> Check {
    struct Nothing;
    impl samite_core::Prepared for Nothing {
        fn as_any(&mut self) -> &mut dyn std::any::Any {
            self
        }
    }
    let mut stream = bench.stream()?;
    let result = stream.run(&mut Nothing, control(&CancelToken::new()));
    ensure(
        result.is_err(),
        "work that another device prepared is no error",
    )?;
    let mut work = bench.work()?;
    work.places[work.x.index()] = None;
    ensure(
        stream.prepare(work.placed()).is_err(),
        "an operand without a place is no error",
    )
}

fn overlapping_places(bench: &Bench) -> Check {
    let mut work = bench.work()?;
    let row = 4 * N;
    let layout = Layout::contiguous(DType::F32, [N, N + 1, 1, 1])?;
    let memory = bench.device.buffer_type();
    let whole = TensorGroup::allocate(&memory, Usage::Compute, &[("t", layout)])?;
    for (id, offset) in [(work.x, 0), (work.y, row)] {
        work.places[id.index()] = Some(TensorRef {
            buffer: Arc::clone(&whole.buffers[0]),
            slot: Slot {
                offset,
                layout: matrix()?,
            },
        });
    }
    ensure(
        bench.stream()?.prepare(work.placed()).is_err(),
        "a result over a part of its operand is no error",
    )
}
