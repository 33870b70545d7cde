//! Copies between all pairs of memories, by the host and by streams.

use super::bench::{Bench, Check, Named, ensure, pattern, read, skip};
use samite_core::{Error, host_buffer_type};

pub(super) const CHECKS: &[Named] = &[
    ("copies between memories", copies_between_memories),
    ("streams copy", streams_copy),
];

fn copies_between_memories(bench: &Bench) -> Check {
    let memories = [bench.device.buffer_type(), host_buffer_type()];
    for from in &memories {
        for to in &memories {
            let (source, target) = (bench.tensor(from)?, bench.tensor(to)?);
            source.write(0, &pattern(2))?;
            target.copy_from(&source)?;
            ensure(
                read(&target)? == pattern(2),
                format!("a copy from {} to {} differs", from.name(), to.name()),
            )?;
        }
    }
    // Weights in a special form are read back unchanged.
    for extra in bench.device.extra_buffer_types() {
        let Ok(target) = bench.tensor(&extra) else {
            continue;
        };
        let source = bench.tensor(&host_buffer_type())?;
        source.write(0, &pattern(3))?;
        target.copy_from(&source)?;
        match target.read(0, &mut vec![0; target.layout().bytes()]) {
            Ok(()) => ensure(
                read(&target)? == pattern(3),
                format!("what lies in {} does not come back", extra.name()),
            )?,
            Err(Error::Unsupported { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn streams_copy(bench: &Bench) -> Check {
    let own = bench.device.buffer_type();
    let mut any = false;
    for (from, to) in [
        (own.clone(), own.clone()),
        (own.clone(), host_buffer_type()),
        (host_buffer_type(), own),
    ] {
        let (source, target) = (bench.tensor(&from)?, bench.tensor(&to)?);
        let mut stream = bench.stream()?;
        if !bench.device.can_copy(&from, &to) {
            continue;
        }
        any = true;
        source.write(0, &pattern(8))?;
        stream.copy(&source, &target)?;
        stream.synchronize()?;
        ensure(
            read(&target)? == pattern(8),
            format!("a copy from {} to {} differs", from.name(), to.name()),
        )?;
    }
    if any {
        Ok(())
    } else {
        skip("its streams do not copy")
    }
}
