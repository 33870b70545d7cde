//! What can be turned off, or made smaller, to try what other adapters lack.

use samite_core::{Error, Parameters, Result};

/// The least binding that is accepted: some blocks of every type fit in it.
const LEAST_BINDING: usize = 64 << 10;

/// How a device uses its adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct WgpuOptions {
    /// Sums are made without operations over subgroups.
    pub without_subgroups: bool,
    /// Products are made without cooperative matrices.
    pub without_matrices: bool,
    /// Operands of a kernel that overlap in memory share a binding, as browsers demand.
    pub without_overlaps: bool,
    /// Compiled kernels are not kept on disk.
    pub without_cache: bool,
    /// The likeliest tokens are chosen on the device; on GPUs if it is not said.
    pub selection: Option<bool>,
    /// Sizes of workgroups and tiles are measured; on GPUs if it is not said.
    pub tuning: Option<bool>,
    /// Most bytes of a tensor that a kernel sees at once; the adapter's limit if that is less, or none is given.
    pub binding: Option<usize>,
    /// Invocations of a workgroup of products with packed weights.
    pub lanes: Option<usize>,
    /// Its rows.
    pub rows: Option<usize>,
}

impl WgpuOptions {
    /// These options, changed by the parameters `subgroups=on|off`, `matrices=on|off`, `overlaps=on|off`, `cache=on|off`, `selection=on|off`, `tuning=on|off` and `binding=<bytes>`, such as `1MiB`, of the device called `device`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other parameters or values.
    pub fn with(mut self, device: &str, mut parameters: Parameters) -> Result<Self> {
        let wrong = |key: &str, text: &str, must: &str| {
            Error::invalid(format!(
                "device '{device}': parameter '{key}' is '{text}', and must be {must}"
            ))
        };
        for (key, without) in [
            ("subgroups", &mut self.without_subgroups),
            ("matrices", &mut self.without_matrices),
            ("overlaps", &mut self.without_overlaps),
            ("cache", &mut self.without_cache),
        ] {
            match parameters.take(key).as_deref() {
                None => {}
                Some("on") => *without = false,
                Some("off") => *without = true,
                Some(other) => return Err(wrong(key, other, "on or off")),
            }
        }
        for (key, wanted) in [
            ("selection", &mut self.selection),
            ("tuning", &mut self.tuning),
        ] {
            if let Some(text) = parameters.take(key) {
                *wanted = Some(match &*text {
                    "on" => true,
                    "off" => false,
                    other => return Err(wrong(key, other, "on or off")),
                });
            }
        }
        if let Some(text) = parameters.take("binding") {
            let bytes = bytes(&text).filter(|&bytes| bytes >= LEAST_BINDING);
            let must = "a size of at least 64KiB, such as 1MiB";
            self.binding = Some(bytes.ok_or_else(|| wrong("binding", &text, must))?);
        }
        for (key, number, allowed) in [
            ("lanes", &mut self.lanes, [32, 64, 128, 256]),
            ("rows", &mut self.rows, [1, 2, 4, 8]),
        ] {
            if let Some(text) = parameters.take(key) {
                let found = text.parse().ok().filter(|number| allowed.contains(number));
                let must = format!("one of {allowed:?}");
                *number = Some(found.ok_or_else(|| wrong(key, &text, &must))?);
            }
        }
        parameters.finish(
            device,
            &[
                "subgroups",
                "matrices",
                "overlaps",
                "cache",
                "selection",
                "tuning",
                "binding",
                "lanes",
                "rows",
            ],
        )?;
        Ok(self)
    }
}

/// A number of bytes, with `KiB`, `MiB`, `GiB` or nothing behind it.
fn bytes(text: &str) -> Option<usize> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
    let (number, shift) = units
        .into_iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)))
        .unwrap_or((text, 0));
    number.parse::<usize>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_read() {
        let with = |text: &str| WgpuOptions::default().with("wgpu0", text.parse().unwrap());
        let options = with("subgroups=off,binding=1MiB").unwrap();
        assert!(options.without_subgroups && !options.without_overlaps);
        assert_eq!(with("selection=on").unwrap().selection, Some(true));
        assert_eq!(with("tuning=off").unwrap().tuning, Some(false));
        assert!(with("cache=off").unwrap().without_cache);
        assert!(with("overlaps=off").unwrap().without_overlaps);
        assert_eq!(options.binding, Some(1 << 20));
        assert_eq!(with("").unwrap(), WgpuOptions::default());
        for (text, part) in [
            ("subgroups=maybe", "'subgroups' is 'maybe'"),
            ("overlaps=1", "'overlaps' is '1'"),
            ("tuning=2", "'tuning' is '2'"),
            ("binding=1KiB", "'binding' is '1KiB'"),
            ("binding=x", "at least 64KiB"),
            (
                "f16=off",
                "it has: subgroups, matrices, overlaps, cache, selection, tuning, binding",
            ),
        ] {
            let error = with(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
