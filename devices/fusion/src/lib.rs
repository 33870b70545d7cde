//! Fuses nodes into launches, for devices that run kernels one after the other.
//!
//! - Products may read their columns from scratch memory in another form, such as 8-bit numbers.
//!   One launch converts the columns for all consecutive products with the same columns, and some
//!   of these products are one launch.
//! - A norm and the multiplication by its weights are one launch, with the addition before it if
//!   there is one.
//! - If such a norm, a gated unit or attention produces the columns of a product, it also converts
//!   them.
//! - RoPE of queries and keys, with the QK norms before it, and the writes of keys and values to
//!   the KV cache are one launch.
//!
//! A device implements [`Kernels`], which builds the launches and refuses those that it has no
//! kernel for. [`launch_list`] decides by the graph and by facts about memory: which weights are
//! packed, and which tensors overlap.

mod before_attention;
mod lists;
mod memory;
mod planner;
#[cfg(test)]
mod tests;

pub use lists::LaunchLists;
pub use memory::Memory;
pub use planner::{LaunchList, launch_list};

use samite_core::{Node, Rope, TensorId, TensorRef};
use std::borrow::Cow;

/// Reason why a node is unsupported.
pub type Unsupported = Cow<'static, str>;

/// A launch, and the node to which it is attributed.
#[derive(Clone, Debug)]
pub struct NodeLaunch<L> {
    /// The node.
    pub node: TensorId,
    /// The launch.
    pub launch: L,
}

/// Facts about the memory of a node's sources.
#[derive(Clone, Copy, Debug, Default)]
pub struct OperandFacts {
    /// True if source 0 is packed.
    pub packed: bool,
    /// True if sources 1 and 2 start at multiples of 16 bytes.
    pub aligned: bool,
}

/// Form in which products read their columns from scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnForm {
    /// 8-bit numbers with scales.
    Int8,
    /// Numbers in f16, scaled into its range.
    F16,
    /// Numbers in bf16.
    BF16,
}

/// A product whose columns a launch of earlier nodes also converts.
#[derive(Clone, Copy)]
pub struct ColumnReader<'a> {
    /// The product.
    pub product: Node<'a>,
    /// Form in which it reads its columns.
    pub form: ColumnForm,
}

/// A norm of rows and the multiplication by its weights.
#[derive(Clone, Copy)]
pub struct ScaledNorm<'a> {
    /// The norm.
    pub norm: Node<'a>,
    /// The multiplication.
    pub scaled: Node<'a>,
    /// The addition whose result is the source of the norm.
    pub sum: Option<Node<'a>>,
    /// Number that is added to the mean of squares.
    pub eps: f32,
}

/// A rotation of heads, with the norm before it if there is one.
#[derive(Clone, Copy)]
pub struct FusedRotation<'a> {
    /// The rotation.
    pub rope: Node<'a>,
    /// The norm of heads. It has no addition.
    pub norm: Option<ScaledNorm<'a>>,
}

impl<'a> FusedRotation<'a> {
    /// Returns the heads before the norm and the rotation.
    pub fn source(&self) -> Option<Node<'a>> {
        self.norm.map_or(self.rope, |norm| norm.norm).source(0)
    }
}

/// Rotations of queries and keys by the same angles, and the writes of the rotated keys and of the
/// values to the KV cache.
#[derive(Clone, Copy)]
pub struct BeforeAttention<'a> {
    /// The rotation of queries.
    pub query: FusedRotation<'a>,
    /// The rotation of keys.
    pub key: FusedRotation<'a>,
    /// The write of the keys.
    pub keys: Node<'a>,
    /// The write of the values.
    pub values: Node<'a>,
    /// Parameters of both rotations.
    pub rope: Rope,
}

/// Launches of several nodes, or `None` if the device has no kernel for them.
pub type Fused<L> = Option<Vec<L>>;

/// Builds the launches of a device. Launches run in order and share one scratch memory, which
/// begins with the converted columns if there are any.
pub trait Kernels: Copy + PartialEq {
    /// A launch without addresses.
    type Launch;

    /// Returns whether the tensor at this place is packed.
    fn is_packed(place: &TensorRef) -> bool;

    /// Returns whether a launch uses scratch memory.
    fn uses_scratch(launch: &Self::Launch) -> bool;

    /// Returns the launches of one node.
    ///
    /// # Errors
    /// Returns the reason if the device does not support the node.
    fn launches_of(
        &self,
        node: Node<'_>,
        facts: OperandFacts,
    ) -> Result<Vec<Self::Launch>, Unsupported>;

    /// Returns the form in which a product reads its columns. Returns `None` if it is no product,
    /// or one that reads them as they are. The columns are source 1 as a whole.
    fn column_form(&self, node: Node<'_>, packed: bool) -> Option<ColumnForm>;

    /// Returns the launches that convert the columns of a product to the form that
    /// [`column_form`](Kernels::column_form) returns.
    fn convert(&self, product: Node<'_>, packed: bool) -> Fused<Self::Launch>;

    /// Returns whether two products with the same columns, which have the form `form`, may be one
    /// launch.
    fn may_join(&self, products: [Node<'_>; 2], form: ColumnForm) -> bool;

    /// Returns the maximum number of products of one launch.
    fn max_products(&self) -> usize;

    /// Returns the launches of products whose columns are in scratch memory.
    fn products(&self, nodes: &[Node<'_>], packed: bool) -> Fused<Self::Launch>;

    /// Returns the launches of a norm. If a product reads the result as its columns, they also
    /// convert it.
    fn scaled_norm(
        &self,
        norm: &ScaledNorm<'_>,
        reader: Option<ColumnReader<'_>>,
    ) -> Fused<Self::Launch>;

    /// Returns the launches of a gated unit that also convert its result.
    fn gated(&self, node: Node<'_>, reader: ColumnReader<'_>) -> Fused<Self::Launch>;

    /// Returns the launches of attention that also convert its result.
    fn attention(
        &self,
        node: Node<'_>,
        facts: OperandFacts,
        reader: ColumnReader<'_>,
    ) -> Fused<Self::Launch>;

    /// Returns the launches of a rotation with a norm.
    fn rotation(&self, rotation: &FusedRotation<'_>, rope: Rope) -> Fused<Self::Launch>;

    /// Returns the launches of all operations before attention.
    fn before_attention(&self, nodes: &BeforeAttention<'_>) -> Fused<Self::Launch>;
}
