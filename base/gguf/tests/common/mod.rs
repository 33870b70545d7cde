//! Builds GGUF files byte by byte, valid or invalid.
#![allow(dead_code)] // each test program uses another part

/// Numbers of the value types.
pub const U32: u32 = 4;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;

#[derive(Clone, Default)]
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    pub fn raw(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.0.extend(bytes.as_ref());
        self
    }

    pub fn u32(self, value: u32) -> Self {
        self.raw(value.to_le_bytes())
    }

    pub fn u64(self, value: u64) -> Self {
        self.raw(value.to_le_bytes())
    }

    pub fn string(self, text: impl AsRef<[u8]>) -> Self {
        self.u64(text.as_ref().len() as u64).raw(text)
    }

    /// Starts a file with magic, version 3 and counts.
    pub fn header(tensors: u64, keys: u64) -> Self {
        Self::default().raw("GGUF").u32(3).u64(tensors).u64(keys)
    }

    pub fn key_u32(self, key: &str, value: u32) -> Self {
        self.string(key).u32(U32).u32(value)
    }

    pub fn key_str(self, key: &str, value: &str) -> Self {
        self.string(key).u32(STRING).string(value)
    }

    /// Returns a tensor's description.
    pub fn tensor(mut self, name: &str, dims: &[u64], dtype: u32, offset: u64) -> Self {
        self = self.string(name).u32(dims.len() as u32);
        for &extent in dims {
            self = self.u64(extent);
        }
        self.u32(dtype).u64(offset)
    }

    /// Appends zeros up to a multiple of `alignment`.
    pub fn pad(mut self, alignment: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(alignment), 0);
        self
    }

    /// Appends padding, then `count` bytes of tensor data.
    pub fn data(self, count: usize) -> Self {
        self.pad(32)
            .raw((0..count).map(|i| i as u8).collect::<Vec<_>>())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// Returns a small valid file with every sort of field; it ends with the last byte of the last
/// tensor.
pub fn valid() -> Vec<u8> {
    Bytes::header(2, 4)
        .key_str("general.architecture", "test")
        .key_u32("general.alignment", 32)
        .string("tokens")
        .u32(ARRAY)
        .u32(STRING)
        .u64(3)
        .string("<s>")
        .string("")
        .string("\u{2581}a")
        .string("scores")
        .u32(ARRAY)
        .u32(6)
        .u64(3)
        .raw([0.5f32, 1.0, -2.0].map(f32::to_le_bytes).concat())
        .tensor("a", &[8, 2], 0, 0)
        .tensor("b", &[32, 2], 8, 64)
        .data(64 + 68)
        .0
}
