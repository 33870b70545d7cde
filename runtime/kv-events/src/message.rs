//! Event batches in MessagePack.
//!
//! A batch is `[time, [event, ...], rank]`. Events are `["BlockStored", hashes, parent, tokens,
//! block_size, null, "GPU"]`, where null is the place of an adapter id, `["BlockRemoved", hashes,
//! "GPU"]` and `["AllBlocksCleared"]`. Routers use "GPU" for the cache in which prompts are
//! computed, whatever its device.

use samite_requests::BlockEvent;
use serde::Serialize;

const MEDIUM: &str = "GPU";

/// A serialized event: an array that starts with its name.
#[derive(Serialize)]
#[serde(untagged)]
enum SerializedEvent<'e> {
    Stored(
        &'static str,
        &'e [u64],
        Option<u64>,
        &'e [u32],
        usize,
        (),
        &'static str,
    ),
    Removed(&'static str, &'e [u64], &'static str),
    Cleared((&'static str,)),
}

/// Encodes a batch. `time` is in seconds since 1970; a block has `size` tokens.
pub(crate) fn batch(
    time: f64,
    size: usize,
    events: &[BlockEvent],
) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    let told = events.iter().map(|event| match event {
        BlockEvent::Stored {
            parent,
            hashes,
            tokens,
        } => SerializedEvent::Stored("BlockStored", hashes, *parent, tokens, size, (), MEDIUM),
        BlockEvent::Removed { hashes } => SerializedEvent::Removed("BlockRemoved", hashes, MEDIUM),
        BlockEvent::Cleared => SerializedEvent::Cleared(("AllBlocksCleared",)),
    });
    rmp_serde::to_vec(&(time, told.collect::<Vec<_>>(), 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_encodes_as_in_msgspec() {
        // Written by Python's msgspec from structures with vLLM's fields (array_like, tag).
        let expected = "93cb3ff80000000000009497ab426c6f636b53746f72656492cfffffffffffffffff07c09401cd012cce000111700002c0a347505597ab426c6f\
            636b53746f72656491090792050602c0a347505593ac426c6f636b52656d6f7665649107a347505591b0416c6c426c6f636b73436c656172656400";
        let stored = |parent, hashes: &[u64], tokens: &[u32]| BlockEvent::Stored {
            parent,
            hashes: hashes.to_vec(),
            tokens: tokens.to_vec(),
        };
        let events = [
            stored(None, &[u64::MAX, 7], &[1, 300, 70_000, 0]),
            stored(Some(7), &[9], &[5, 6]),
            BlockEvent::Removed { hashes: vec![7] },
            BlockEvent::Cleared,
        ];
        let bytes = batch(1.5, 2, &events).unwrap();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected);
    }
}
