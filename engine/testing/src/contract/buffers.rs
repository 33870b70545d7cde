//! Contents, locations and sizes of buffers.

use super::bench::{Bench, Check, N, Named, ensure, pattern, read};
use samite_core::{DType, Layout, Result, Rows, TensorInfo, Usage};

pub(super) const CHECKS: &[Named] = &[
    ("buffers hold what is written", buffers_hold_what_is_written),
    ("locations", locations),
    ("sizes in bulk", sizes_in_bulk),
];

fn buffers_hold_what_is_written(bench: &Bench) -> Check {
    let memory = bench.device.buffer_type();
    let alignment = memory.alignment();
    ensure(
        alignment.is_power_of_two(),
        "the alignment is no power of two",
    )?;
    let tensor = bench.tensor(&memory)?;
    ensure(
        read(&tensor)?.iter().all(|&byte| byte == 0),
        "new memory is not zeroed",
    )?;
    let mut expected = pattern(1);
    tensor.write(0, &expected)?;
    ensure(read(&tensor)? == expected, "reading gives something else")?;
    tensor.write(5, &[1, 2, 3])?;
    expected[5..8].copy_from_slice(&[1, 2, 3]);
    tensor.buffer.fill(tensor.slot, 101, 50, 9)?;
    expected[101..151].fill(9);
    let rows = Rows {
        offset: 300,
        len: 8,
        count: 3,
        stride: 256,
        host_stride: 16,
    };
    tensor.write_rows(rows, &[7; 40])?;
    for row in 0..3 {
        expected[300 + 256 * row..][..8].fill(7);
    }
    ensure(
        read(&tensor)? == expected,
        "partial writes are not where they belong",
    )?;
    let mut out = [0; 40];
    tensor.read_rows(rows, &mut out)?;
    let gaps = |i: usize| i % 16 >= 8;
    ensure(
        (0..40).all(|i| out[i] == if gaps(i) { 0 } else { 7 }),
        "rows are not read at their distances",
    )?;
    tensor.buffer.clear(3)?;
    ensure(
        read(&tensor)?.iter().all(|&byte| byte == 3),
        "clear() leaves something",
    )
}

fn locations(bench: &Bench) -> Check {
    let memory = bench.device.buffer_type();
    let (a, b) = (bench.tensor(&memory)?, bench.tensor(&memory)?);
    ensure(
        a.buffer.location() == a.buffer.location(),
        "a buffer's location changes",
    )?;
    ensure(
        a.overlaps(&a) && !a.overlaps(&b) && !b.overlaps(&a),
        "the locations of two buffers overlap",
    )?;
    match a.buffer.host() {
        Some(host) => ensure(
            a.buffer.location() == host.location(),
            "a buffer over host memory lies elsewhere than the memory",
        ),
        None => Ok(()),
    }
}

fn sizes_in_bulk(bench: &Bench) -> Check {
    let mut memories = vec![bench.device.buffer_type()];
    memories.extend(bench.device.extra_buffer_types());
    for memory in memories {
        let layouts = [[N, 1, 1, 1], [N, N, 1, 1], [2 * N, 3, 2, 1]];
        let mut infos = Vec::new();
        for shape in layouts {
            let layout = Layout::contiguous(DType::F32, shape)?;
            infos.push(TensorInfo::new("w", layout, Usage::Weights));
        }
        let one_by_one: Result<Vec<_>> = infos.iter().map(|info| memory.alloc_size(info)).collect();
        let (Ok(one_by_one), Ok(all)) = (one_by_one, memory.alloc_sizes(&infos)) else {
            continue; // special memory need not take such tensors
        };
        ensure(one_by_one == all, "sizes asked for together are others")?;
    }
    Ok(())
}
