//! Compiled nodes: kernels without memory, one for each operation with its parameters and operand
//! types.

use crate::device::ReferenceDevice;
use crate::kernels::{Kernel, kernel};
use samite_core::{
    CancelToken, Compiled, DType, Device, Error, Graph, Node, Op, Result, Support, TensorId,
};
use std::any::Any;
use std::sync::Arc;

/// Kernels of a sequence of nodes.
pub(crate) struct CompiledNodes {
    device: Arc<str>,
    nodes: Vec<(KernelKey, Kernel)>,
}

/// Key of a kernel: parameters and types, but no extents of operands.
#[derive(Debug, PartialEq)]
struct KernelKey {
    op: Op,
    result: DType,
    sources: Vec<Option<DType>>,
}

impl KernelKey {
    fn from_node(node: Node<'_>) -> Self {
        let sources = 0..node.tensor().sources.len();
        KernelKey {
            op: *node.op(),
            result: node.dtype(),
            sources: sources
                .map(|index| node.source(index).map(Node::dtype))
                .collect(),
        }
    }
}

impl CompiledNodes {
    /// Returns the kernels of `nodes`, or `earlier` if they are the same.
    pub fn compile(
        device: &ReferenceDevice,
        graph: &Graph,
        nodes: &[TensorId],
        earlier: Option<&Arc<dyn Compiled>>,
        cancel: &CancelToken,
    ) -> Result<Arc<dyn Compiled>> {
        let computed = || {
            let nodes = nodes.iter().map(|&id| graph.node(id));
            nodes.filter(|node| node.tensor().is_computed())
        };
        if let Some(earlier) = earlier
            && let Some(known) = earlier.as_any().downcast_ref::<CompiledNodes>()
            && *known.device == *device.name()
            && known.nodes.len() == computed().count()
            && computed()
                .zip(&known.nodes)
                .all(|(node, (kind, _))| KernelKey::from_node(node) == *kind)
        {
            return Ok(Arc::clone(earlier));
        }
        device.count_compilation();
        let nodes = computed()
            .map(|node| {
                cancel.check()?;
                Ok((KernelKey::from_node(node), kernel_of(device, node)?))
            })
            .collect::<Result<_>>()?;
        Ok(Arc::new(CompiledNodes {
            device: device.shared_name(),
            nodes,
        }))
    }

    /// Returns the kernel of computed node number `number`, which must be of the kind that was
    /// compiled.
    pub fn kernel(&self, number: usize, node: Node<'_>) -> Result<Kernel> {
        match self.nodes.get(number) {
            Some((kind, kernel)) if *kind == KernelKey::from_node(node) => Ok(kernel.clone()),
            _ => Err(Error::invalid(format!(
                "{node:?} is not what {} compiled at this place",
                self.device
            ))),
        }
    }
}

/// Returns the kernel of a node.
pub(crate) fn kernel_of(device: &ReferenceDevice, node: Node<'_>) -> Result<Kernel> {
    let reason = match (device.supports(node), kernel(node.op())) {
        (Support::Yes, Some(kernel)) => return Ok(kernel),
        (Support::Yes, None) => "there is no kernel for it".into(),
        (Support::No(reason), _) => reason,
    };
    Err(Error::unsupported(
        device.name(),
        node.op().to_string(),
        reason,
    ))
}

impl std::fmt::Debug for CompiledNodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CompiledNodes({}, {})", self.device, self.nodes.len())
    }
}

impl Compiled for CompiledNodes {
    fn as_any(&self) -> &dyn Any {
        self
    }
}
