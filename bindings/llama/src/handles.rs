//! Handles: numbers that callers hold as pointers, and the tables of the objects that they stand
//! for.
//!
//! Numbers are never reused, so stale handles are always detected.

use crate::entry::{Failure, Outcome};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Objects of one kind, by handle.
pub struct Handles<T> {
    what: &'static str,
    table: RwLock<BTreeMap<usize, Arc<T>>>,
}

/// Next handle. Handles look like aligned pointers.
static NEXT: AtomicUsize = AtomicUsize::new(1 << 20);

/// Returns an unused handle.
pub fn fresh() -> usize {
    NEXT.fetch_add(16, Ordering::Relaxed)
}

impl<T> Handles<T> {
    /// Creates an empty table; `what` names its objects in messages.
    pub const fn new(what: &'static str) -> Self {
        Handles {
            what,
            table: RwLock::new(BTreeMap::new()),
        }
    }

    /// Adds an object and returns its handle.
    pub fn add<P>(&self, object: T) -> *mut P {
        self.insert(fresh(), object)
    }

    /// Adds an object with a [fresh](fresh) handle.
    pub fn insert<P>(&self, handle: usize, object: T) -> *mut P {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        table.insert(handle, Arc::new(object));
        std::ptr::without_provenance_mut(handle)
    }

    /// Returns the object of a handle.
    ///
    /// # Errors
    /// If the handle is null, of another kind, or stale.
    pub fn get<P>(&self, handle: *const P) -> Outcome<Arc<T>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        table.get(&handle.addr()).cloned().ok_or_else(|| {
            if handle.is_null() {
                Failure::new(format!("the {} is null", self.what))
            } else {
                Failure::new(format!(
                    "{handle:p} is no {}, or was freed already",
                    self.what
                ))
            }
        })
    }

    /// Removes an object; calls in progress keep it alive. Ignores null.
    ///
    /// # Errors
    /// If the handle is of another kind or stale.
    pub fn remove<P>(&self, handle: *mut P) -> Outcome<Option<Arc<T>>> {
        if handle.is_null() {
            return Ok(None);
        }
        let removed = {
            let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
            table.remove(&handle.addr())
        };
        match removed {
            Some(object) => Ok(Some(object)),
            None => Err(Failure::new(format!(
                "{handle:p} is no {}, or was freed already",
                self.what
            ))),
        }
    }

    /// Removes all objects except those that `is_kept` selects.
    pub fn retain(&self, mut is_kept: impl FnMut(&T) -> bool) {
        let mut gone = Vec::new();
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        table.retain(|_, object| {
            let kept = is_kept(object);
            if !kept {
                gone.push(Arc::clone(object));
            }
            kept
        });
        // Drop the objects after releasing the lock.
        drop(table);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_never_reused() {
        let handles = Handles::new("thing");
        let first: *mut u8 = handles.add(1);
        assert_eq!(
            handles.get(first.cast_const()).map(|one| *one).ok(),
            Some(1)
        );
        let kept = handles.remove(first).unwrap().unwrap();
        let second: *mut u8 = handles.add(2);
        assert!(first != second && handles.get(first.cast_const()).is_err());
        assert!(handles.remove(first).is_err() && *kept == 1);
        assert!(
            handles
                .remove::<u8>(std::ptr::null_mut())
                .unwrap()
                .is_none()
        );
        handles.retain(|number| *number != 2);
        assert!(handles.get(second.cast_const()).is_err());
    }
}
