//! The kernels, by kind of operation. Each module turns a
//! [`KernelContext`](crate::kernel::KernelContext) into phases.
//!
//! A task always computes the same elements in the same order, whichever worker runs it, so results
//! do not depend on the number of threads. Kernels of operations that may run in place read an
//! element before they write it.

pub(crate) mod attention;
pub(crate) mod backward;
pub(crate) mod columns;
pub(crate) mod convolution;
pub(crate) mod copy;
pub(crate) mod delta;
pub(crate) mod elementwise;
pub(crate) mod experts;
pub(crate) mod formula;
pub(crate) mod glu;
pub(crate) mod indexer;
#[cfg(test)]
mod known_answers;
pub(crate) mod matmul;
pub(crate) mod out_prod;
pub(crate) mod outer;
mod packed_table;
pub(crate) mod reduce;
pub(crate) mod rope;
pub(crate) mod rows;
pub(crate) mod shape;
pub(crate) mod softmax;
pub(crate) mod sort;
pub(crate) mod state;
pub(crate) mod training;
