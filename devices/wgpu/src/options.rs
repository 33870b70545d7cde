//! Options that turn features off or lower limits, to test what other adapters lack.

use samite_core::{Error, Parameters, Result};

/// Minimum binding size: blocks of every type fit into it.
const MIN_BINDING: usize = 64 << 10;

/// Options of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct WgpuOptions {
    /// Set to reduce without subgroup operations.
    pub without_subgroups: bool,
    /// Set to multiply without cooperative matrices.
    pub without_matrices: bool,
    /// Set if operands of a kernel that overlap in memory must share a binding, as in browsers.
    pub without_overlaps: bool,
    /// Set to keep no compiled kernels on disk.
    pub without_cache: bool,
    /// Overrides whether the device selects the top-k tokens. The default is to do so on GPUs.
    pub selection: Option<bool>,
    /// Overrides whether workgroup and tile sizes are measured. The default is to do so on GPUs.
    pub tuning: Option<bool>,
    /// Maximum size in bytes of a binding. The adapter's limit applies if it is lower or this is
    /// `None`.
    pub binding: Option<usize>,
    /// Invocations per workgroup of products with packed weights.
    pub lanes: Option<usize>,
    /// Rows per workgroup of these products.
    pub rows: Option<usize>,
}

impl WgpuOptions {
    /// Returns these options with changes by the parameters `subgroups=on|off`, `matrices=on|off`,
    /// `overlaps=on|off`, `cache=on|off`, `selection=on|off`, `tuning=on|off` and
    /// `binding=<bytes>`, such as `1MiB`, of the device called `device`.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for other parameters or values.
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
            let bytes = bytes(&text).filter(|&bytes| bytes >= MIN_BINDING);
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

/// Parses a number of bytes with an optional suffix `KiB`, `MiB` or `GiB`.
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
    fn wgpu_parameters_are_parsed() {
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
