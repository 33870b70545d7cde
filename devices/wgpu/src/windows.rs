//! Merges overlapping buffer bindings, which browsers require.
//!
//! Browsers reject a kernel that writes memory through one binding and accesses it through another.
//! There, operands that overlap share a binding.

use samite_core::MemoryId;

/// Range of a buffer that a binding covers, in bytes.
#[derive(Debug)]
pub struct BindingWindow<B> {
    pub buffer: B,
    pub memory: MemoryId,
    pub begin: u64,
    pub end: u64,
}

impl<B> BindingWindow<B> {
    fn overlaps(&self, other: &Self) -> bool {
        self.memory == other.memory && self.begin < other.end && other.begin < self.end
    }
}

/// Merges overlapping windows and writes the new window of each operand to `numbers`. Returns
/// whether any overlapped.
pub fn share<B>(windows: &mut Vec<BindingWindow<B>>, numbers: &mut [u8]) -> bool {
    let before = windows.len();
    let overlap = |windows: &[BindingWindow<B>]| {
        let mut pairs =
            (0..windows.len()).flat_map(|a| (a + 1..windows.len()).map(move |b| (a, b)));
        pairs.find(|&(a, b)| windows[a].overlaps(&windows[b]))
    };
    // A merged window may overlap others.
    while let Some((kept, gone)) = overlap(windows) {
        let other = windows.remove(gone);
        windows[kept].begin = windows[kept].begin.min(other.begin);
        windows[kept].end = windows[kept].end.max(other.end);
        for number in &mut *numbers {
            *number = match usize::from(*number) {
                x if x == gone => kept as u8,
                x if x > gone => *number - 1,
                _ => *number,
            };
        }
    }
    windows.len() < before
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_windows_are_merged() {
        let (first, second) = (MemoryId::unique(), MemoryId::unique());
        let window = |memory, begin, end| BindingWindow {
            buffer: (),
            memory,
            begin,
            end,
        };
        // The second and the last window touch only through the fourth. The third is in another
        // memory.
        let mut windows = vec![
            window(first, 0, 100),
            window(first, 200, 300),
            window(second, 200, 300),
            window(first, 256, 512),
            window(first, 508, 600),
        ];
        let mut numbers = [0, 1, 2, 3, 4];
        assert!(share(&mut windows, &mut numbers));
        assert_eq!(numbers, [0, 1, 2, 1, 1]);
        let places: Vec<_> = windows.iter().map(|w| (w.memory, w.begin, w.end)).collect();
        let expected = [(first, 0, 100), (first, 200, 600), (second, 200, 300)];
        assert_eq!(places, expected);
        let mut numbers = [0, 1, 2];
        assert!(!share(&mut windows, &mut numbers));
        assert_eq!(numbers, [0, 1, 2]);
    }
}
