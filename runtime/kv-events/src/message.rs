//! Event batches in MessagePack, as vLLM 0.33 writes them.
//!
//! A batch is the array `[time, [event, ...], rank]`. An event is a map whose `type` is
//! `BlockStored`, `BlockRemoved` or `AllBlocksCleared`. The medium "GPU" is the cache in which
//! prompts are computed, whatever its device.

use samite_requests::BlockEvent;
use serde::Serialize;

const MEDIUM: &str = "GPU";

#[derive(Serialize)]
#[serde(tag = "type")]
enum SerializedEvent<'e> {
    BlockStored {
        block_hashes: &'e [u64],
        parent_block_hash: Option<u64>,
        token_ids: &'e [u32],
        block_size: usize,
        lora_id: (),
        medium: &'static str,
        lora_name: (),
    },
    BlockRemoved {
        block_hashes: &'e [u64],
        medium: &'static str,
    },
    AllBlocksCleared,
}

/// Encodes a batch. `time` is in seconds since 1970; a block has `size` tokens.
pub(crate) fn batch(
    time: f64,
    size: usize,
    events: &[BlockEvent],
) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    let serialized = events.iter().map(|event| match event {
        BlockEvent::Stored {
            parent,
            hashes,
            tokens,
        } => SerializedEvent::BlockStored {
            block_hashes: hashes,
            parent_block_hash: *parent,
            token_ids: tokens,
            block_size: size,
            lora_id: (),
            medium: MEDIUM,
            lora_name: (),
        },
        BlockEvent::Removed { hashes } => SerializedEvent::BlockRemoved {
            block_hashes: hashes,
            medium: MEDIUM,
        },
        BlockEvent::Cleared => SerializedEvent::AllBlocksCleared,
    });
    rmp_serde::to_vec_named(&(time, serialized.collect::<Vec<_>>(), 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_encodes_as_in_msgspec() {
        // Written by Python's msgspec 0.23 from structures with vLLM's fields.
        let expected = concat!(
            "93cb3ff80000000000009488a474797065ab426c6f636b53746f726564ac626c6f636b5f686173",
            "68657392cfffffffffffffffff07b1706172656e745f626c6f636b5f68617368c0a9746f6b656e",
            "5f6964739401cd012cce0001117000aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d65",
            "6469756da3475055a96c6f72615f6e616d65c088a474797065ab426c6f636b53746f726564ac62",
            "6c6f636b5f6861736865739109b1706172656e745f626c6f636b5f6861736807a9746f6b656e5f",
            "696473920506aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a9",
            "6c6f72615f6e616d65c083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173",
            "6865739107a66d656469756da347505581a474797065b0416c6c426c6f636b73436c6561726564",
            "00",
        );
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
