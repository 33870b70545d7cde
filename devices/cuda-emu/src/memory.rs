//! Memory of an emulated card.

use std::fmt;

/// Lowest address of an allocation. No address of another space reaches it, so pointers that are
/// mixed up show.
const FIRST_ADDRESS: u64 = 0x7000_0000_0000;

/// Unmapped bytes between allocations. They catch indices that are off by less than this.
const GUARD: u64 = 1 << 16;

/// Alignment of allocations, as the driver's.
const ALIGNMENT: u64 = 256;

/// Byte that fills new allocations. As floats, it gives NaN.
const FRESH: u8 = 0xff;

/// An allocation that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Bytes that were asked for.
    pub requested: usize,
    /// Bytes that were free.
    pub free: usize,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "out of device memory: {} bytes requested, {} free",
            self.requested, self.free
        )
    }
}

impl std::error::Error for OutOfMemory {}

/// A range that no allocation contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessError {
    /// First address.
    pub address: u64,
    /// Number of bytes.
    pub bytes: usize,
}

impl fmt::Display for AccessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes at {:#x} are outside every allocation",
            self.bytes, self.address
        )
    }
}

impl std::error::Error for AccessError {}

struct Allocation {
    address: u64,
    data: Vec<u8>,
    is_read_only: bool,
    /// True if a kernel may have written to it.
    is_computed: bool,
}

/// Global memory of one emulated card.
///
/// Addresses are never reused, so a kernel that uses freed memory always faults.
pub struct DeviceMemory {
    /// Sorted by address, because addresses only grow.
    allocations: Vec<Allocation>,
    next: u64,
    used: usize,
    capacity: usize,
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory")
            .field("allocations", &self.allocations.len())
            .field("used", &self.used)
            .field("capacity", &self.capacity)
            .finish()
    }
}

impl DeviceMemory {
    /// Creates a memory of `capacity` bytes. Only allocations occupy memory of the host.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            allocations: Vec::new(),
            next: FIRST_ADDRESS,
            used: 0,
            capacity,
        }
    }

    /// Allocates `bytes`, filled with 0xFF, and returns their address.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn alloc(&mut self, bytes: usize) -> Result<u64, OutOfMemory> {
        let error = OutOfMemory {
            requested: bytes,
            free: self.free_bytes(),
        };
        let rounded = bytes
            .max(1)
            .checked_next_multiple_of(ALIGNMENT as usize)
            .ok_or(error)?;
        if rounded > self.free_bytes() {
            return Err(error);
        }
        let end = self.next.checked_add(rounded as u64 + GUARD).ok_or(error)?;
        let mut data = Vec::new();
        data.try_reserve_exact(bytes).map_err(|_| error)?;
        data.resize(bytes, FRESH);
        let address = self.next;
        self.allocations.push(Allocation {
            address,
            data,
            is_read_only: false,
            is_computed: false,
        });
        self.used += rounded;
        self.next = end;
        Ok(address)
    }

    /// Frees an allocation. Returns false if none starts at `address`.
    pub fn free(&mut self, address: u64) -> bool {
        let Ok(index) = self
            .allocations
            .binary_search_by_key(&address, |a| a.address)
        else {
            return false;
        };
        let allocation = self.allocations.remove(index);
        self.used -= allocation
            .data
            .len()
            .max(1)
            .next_multiple_of(ALIGNMENT as usize);
        true
    }

    /// Returns the size of the allocation that starts at `address`.
    #[must_use]
    pub fn size_of(&self, address: u64) -> Option<usize> {
        let index = self
            .allocations
            .binary_search_by_key(&address, |a| a.address)
            .ok()?;
        Some(self.allocations[index].data.len())
    }

    /// Returns the number of bytes that can be allocated.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        self.capacity - self.used
    }

    /// Returns the number of bytes of the card.
    #[must_use]
    pub fn total_bytes(&self) -> usize {
        self.capacity
    }

    /// Reads bytes.
    ///
    /// # Errors
    /// If no allocation contains the range.
    pub fn read(&self, address: u64, to: &mut [u8]) -> Result<(), AccessError> {
        to.copy_from_slice(self.slice(address, to.len())?);
        Ok(())
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// If no allocation contains the range.
    pub fn write(&mut self, address: u64, from: &[u8]) -> Result<(), AccessError> {
        self.slice_mut(address, from.len())?.copy_from_slice(from);
        Ok(())
    }

    /// Fills bytes.
    ///
    /// # Errors
    /// If no allocation contains the range.
    pub fn fill(&mut self, address: u64, bytes: usize, value: u8) -> Result<(), AccessError> {
        self.slice_mut(address, bytes)?.fill(value);
        Ok(())
    }

    /// Copies bytes. The ranges may overlap.
    ///
    /// # Errors
    /// If no allocation contains one of the ranges.
    pub fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), AccessError> {
        let data = self.slice(from, bytes)?.to_vec();
        self.write(to, &data)
    }

    /// Returns a range of bytes.
    ///
    /// # Errors
    /// If no allocation contains the range.
    pub fn slice(&self, address: u64, bytes: usize) -> Result<&[u8], AccessError> {
        let error = AccessError { address, bytes };
        let index = self.find(address).ok_or(error)?;
        let allocation = &self.allocations[index];
        let start = (address - allocation.address) as usize;
        allocation.data[start..].get(..bytes).ok_or(error)
    }

    /// Returns a range of bytes.
    ///
    /// # Errors
    /// If no allocation contains the range.
    pub fn slice_mut(&mut self, address: u64, bytes: usize) -> Result<&mut [u8], AccessError> {
        let error = AccessError { address, bytes };
        let index = self.find(address).ok_or(error)?;
        let allocation = &mut self.allocations[index];
        let start = (address - allocation.address) as usize;
        allocation.data[start..].get_mut(..bytes).ok_or(error)
    }

    /// Makes an allocation read-only for kernels.
    pub(crate) fn protect(&mut self, address: u64) {
        if let Some(index) = self.find(address) {
            self.allocations[index].is_read_only = true;
        }
    }

    /// Returns the index of the allocation that contains `address` (or ends there).
    pub(crate) fn find(&self, address: u64) -> Option<usize> {
        let index = self
            .allocations
            .partition_point(|a| a.address <= address)
            .checked_sub(1)?;
        let allocation = &self.allocations[index];
        (address - allocation.address <= allocation.data.len() as u64).then_some(index)
    }

    /// Returns the address and the bytes of allocation `index`.
    pub(crate) fn allocation(&self, index: usize) -> Option<(u64, &[u8])> {
        self.allocations
            .get(index)
            .map(|a| (a.address, a.data.as_slice()))
    }

    /// Returns the address and the bytes of allocation `index`, or `None` if it is read-only.
    pub(crate) fn writable_allocation(&mut self, index: usize) -> Option<(u64, &mut [u8])> {
        let allocation = self.allocations.get_mut(index)?;
        if allocation.is_read_only {
            return None;
        }
        allocation.is_computed = true;
        Some((allocation.address, allocation.data.as_mut_slice()))
    }

    /// Returns whether a kernel may have written to allocation `index`.
    pub(crate) fn is_computed(&self, index: usize) -> bool {
        self.allocations.get(index).is_some_and(|a| a.is_computed)
    }

    /// Returns the number of allocations.
    pub(crate) fn allocation_count(&self) -> usize {
        self.allocations.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_apart_and_never_reused() {
        let mut memory = DeviceMemory::new(1024);
        let a = memory.alloc(10).unwrap();
        let b = memory.alloc(256).unwrap();
        assert_eq!(a % 256, 0);
        assert!(b >= a + 256 + GUARD);
        assert_eq!(memory.free_bytes(), 512);
        assert_eq!(memory.size_of(a), Some(10));
        let mut byte = [0; 1];
        assert!(memory.read(a + 9, &mut byte).is_ok());
        assert_eq!(byte, [0xff]);
        assert!(memory.read(a + 10, &mut byte).is_err());
        assert!(memory.read(a - 1, &mut byte).is_err());
        assert!(memory.read(u64::MAX, &mut byte).is_err());
        assert!(memory.free(a));
        assert!(!memory.free(a));
        assert!(memory.read(a, &mut byte).is_err());
        assert!(memory.alloc(769).is_err());
        assert!(memory.alloc(usize::MAX).is_err());
        assert!(memory.alloc(768).unwrap() > b);
    }

    #[test]
    fn ranges_end_with_the_allocation() {
        let mut memory = DeviceMemory::new(4096);
        let a = memory.alloc(8).unwrap();
        memory.write(a, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        memory.copy(a + 2, a, 6).unwrap();
        assert_eq!(memory.slice(a, 8).unwrap(), [1, 2, 1, 2, 3, 4, 5, 6]);
        assert!(memory.copy(a + 3, a, 6).is_err());
        assert!(memory.fill(a, 9, 0).is_err());
    }
}
