//! No bytes may make the GGUF parser panic; accepted files must be valid and survive a round trip
//! through the writer.
#![no_main]

use libfuzzer_sys::fuzz_target;
use samite_gguf::{Header, TensorSpec, Writer};

fuzz_target!(|bytes: &[u8]| {
    let header = match Header::from_bytes(bytes) {
        Ok(header) => header,
        Err(error) => {
            assert!(!error.to_string().contains('\n'), "an error is one line");
            return;
        }
    };
    for info in &header.tensors {
        let end = usize::try_from(info.offset)
            .ok()
            .and_then(|start| start.checked_add(info.size));
        assert!(
            end.is_some_and(|end| end <= bytes.len()),
            "data lies inside the file"
        );
        assert!(
            header.tensors.get(&info.name).is_some(),
            "a tensor is found by its name"
        );
    }
    for (key, value) in header.metadata.iter() {
        assert!(header.metadata.contains(key), "a key is found by its name");
        let _ = value.to_string();
        let _ = header.metadata.get::<u32>(key);
        let _ = header.metadata.get::<&str>(key);
        let _ = header.metadata.get::<Vec<i64>>(key);
        let _ = header.metadata.get::<Vec<&str>>(key);
    }
    // Names longer than the writer's limit can be read but not written.
    let specs = header
        .tensors
        .iter()
        .map(|info| TensorSpec::from_info(info, info.dtype));
    if let Ok(specs) = specs.collect::<Result<Vec<_>, _>>() {
        let mut writer =
            Writer::new(Vec::new(), &header.metadata, specs).expect("what was read can be written");
        for info in &header.tensors {
            let start = info.offset as usize;
            writer
                .append(&bytes[start..start + info.size])
                .expect("sizes agree");
        }
        let written = writer.finish().expect("all tensors are written");
        let again = Header::from_bytes(&written).expect("what was written can be read");
        assert_eq!(
            (again.metadata.len(), again.tensors.len()),
            (header.metadata.len(), header.tensors.len())
        );
    }
});
