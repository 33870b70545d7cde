//! Reports the memory usage by kind of memory and purpose.

/// Bytes in one kind of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Name of the memory, such as `host`.
    pub memory: String,
    /// Weights of the model and its adapters, which all contexts share, including mapped files.
    pub weights: usize,
    /// The KV cache.
    pub kv: usize,
    /// Intermediate results.
    pub compute: usize,
}

/// Adds up bytes by kind of memory.
#[derive(Default)]
pub(crate) struct MemoryReport(Vec<MemoryUse>);

/// Purpose of bytes: a field of [`MemoryUse`].
pub(crate) type Purpose = fn(&mut MemoryUse) -> &mut usize;

impl MemoryReport {
    pub const WEIGHTS: Purpose = |row| &mut row.weights;
    pub const KV: Purpose = |row| &mut row.kv;
    pub const COMPUTE: Purpose = |row| &mut row.compute;

    /// Adds bytes by name of the memory.
    pub fn add<N: AsRef<str>>(
        &mut self,
        bytes: impl IntoIterator<Item = (N, usize)>,
        purpose: Purpose,
    ) {
        for (name, bytes) in bytes {
            if bytes == 0 {
                continue;
            }
            let name = name.as_ref();
            let at = self.0.iter().position(|row| row.memory == name);
            let at = at.unwrap_or_else(|| {
                self.0.push(MemoryUse {
                    memory: name.to_owned(),
                    ..MemoryUse::default()
                });
                self.0.len() - 1
            });
            *purpose(&mut self.0[at]) += bytes;
        }
    }

    pub fn finish(self) -> Vec<MemoryUse> {
        self.0
    }
}
