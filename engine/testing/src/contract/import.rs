//! Host memory that a device uses: imported and pinned.

use super::bench::{Bench, Check, Named, ensure, matrix, pattern, read, skip};
use samite_core::{Buffer, HostMemory, StoredTensor, Usage, host_buffer};
use std::sync::Arc;

pub(super) const CHECKS: &[Named] = &[("import", import), ("pinned memory", pinned_memory)];

fn import(bench: &Bench) -> Check {
    let device = &bench.device;
    let bytes = matrix()?.bytes();
    let memory = HostMemory::allocate(bytes, "host", "memory to import")?;
    if !device.capabilities().import_host {
        let result = device.import_host(memory, Usage::Any);
        ensure(result.is_err(), "it imports and says that it cannot")?;
        return skip("it does not import host memory");
    }
    let alignment = device.import_alignment();
    ensure(
        alignment.is_power_of_two(),
        "the alignment is no power of two",
    )?;
    if !memory.location().offset.is_multiple_of(alignment) {
        return skip("the allocator's memory is not aligned enough");
    }
    let buffer: Arc<dyn Buffer> = device.import_host(Arc::clone(&memory), Usage::Any)?;
    ensure(
        buffer.location() == memory.location(),
        "imported memory lies elsewhere, so that nobody sees conflicts",
    )?;
    let imported = StoredTensor::new("imported", buffer, 0, matrix()?)?;
    let plain = host_buffer(Arc::clone(&memory), Usage::Any);
    let plain = StoredTensor::new("plain", plain, 0, matrix()?)?;
    ensure(
        imported.tensor().overlaps(plain.tensor()),
        "an import does not overlap with what it imports",
    )?;
    plain.tensor().write(0, &pattern(9))?;
    ensure(
        read(imported.tensor())? == pattern(9),
        "an import does not see what the host writes",
    )?;
    imported.tensor().write(0, &pattern(10))?;
    ensure(
        read(plain.tensor())? == pattern(10),
        "the host does not see what is written to an import",
    )
}

fn pinned_memory(bench: &Bench) -> Check {
    let Some(memory) = bench.device.host_buffer_type() else {
        ensure(
            !bench.device.capabilities().host_buffer,
            "it says that it has pinned memory, and has none",
        )?;
        return skip("it has no pinned memory");
    };
    ensure(memory.is_host(), "its pinned memory is no host memory")?;
    let tensor = bench.tensor(&memory)?;
    ensure(
        tensor.buffer.host().is_some(),
        "its pinned memory is not to be seen by the host",
    )?;
    tensor.write(0, &pattern(11))?;
    let own = bench.tensor(&bench.device.buffer_type())?;
    own.copy_from(&tensor)?;
    ensure(
        read(&own)? == pattern(11),
        "a copy from pinned memory differs",
    )
}
