//! Decoded instructions.
//!
//! Registers are indices into files of a warp. Immediate operands and special registers are
//! registers too, which are set when a warp starts, so that operations have only one form.

pub(crate) use super::types::{
    Binary, Class, Comparison, Count, Logic, PermuteMode, Rounding, Ternary, Type, Unary, flag,
};

/// Index of a register. The file follows from the operation: predicates, registers of up to 32
/// bits, and registers of 64 bits.
pub(crate) type Register = u16;

/// Marks an operand that is absent or discarded.
pub(crate) const NO_REGISTER: Register = u16::MAX;

/// Predicate that is false in all lanes.
pub(crate) const FALSE: Register = 0;

/// Predicate that is true in all lanes.
pub(crate) const TRUE: Register = 1;

/// Number of predicates that are constants.
pub(crate) const CONSTANT_PREDICATES: usize = 2;

/// Names of special registers, which occupy the first 32-bit registers in this order.
pub(crate) const SPECIAL_REGISTERS: [&str; 31] = [
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%laneid",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%lanemask_eq",
    "%lanemask_le",
    "%lanemask_lt",
    "%lanemask_ge",
    "%lanemask_gt",
    "%dynamic_smem_size",
    "%total_smem_size",
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%cluster_ctaid.x",
    "%cluster_nctaid.x",
    "%clusterid.x",
    "%nclusterid.x",
    "%gridid",
];

/// State space of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Any space, by address.
    Generic,
    /// Memory of the card.
    Global,
    /// Constants of a module.
    Const,
    /// Memory of a block.
    Shared,
    /// Memory of a thread.
    Local,
    /// Parameters of the kernel.
    Param,
}

/// An address: a register, plus an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PtxAddress {
    pub(crate) register: Register,
    pub(crate) is_wide: bool,
    pub(crate) offset: i32,
}

/// Order of a load or store among others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ordering {
    /// Plain.
    Weak,
    /// `ld.global.nc`: the kernel promises that the memory is constant.
    Constant,
    /// Atomic, without order.
    Relaxed,
    /// Later accesses see what was released.
    Acquire,
    /// Publishes earlier writes.
    Release,
    /// Both.
    AcquireRelease,
}

impl Ordering {
    pub(crate) fn acquires(self) -> bool {
        matches!(self, Self::Acquire | Self::AcquireRelease)
    }

    pub(crate) fn releases(self) -> bool {
        matches!(self, Self::Release | Self::AcquireRelease)
    }
}

/// Operation of an atomic access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareExchange,
    Increment,
    Decrement,
}

/// Mode of a shuffle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

/// Kind of a vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VoteMode {
    All,
    Any,
    Uniform,
    Ballot,
}

/// Result that a barrier computes from the threads' predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BarrierMode {
    Sync,
    Arrive,
    CountTrue,
    AllTrue,
    AnyTrue,
}

/// Operation on an object in shared memory that counts arrivals and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MbarrierOp {
    Init,
    Invalidate,
    Arrive { expects: bool, completes: bool },
    ExpectBytes,
    Test { by_parity: bool },
}

/// An asynchronous copy of a block of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BulkCopy {
    /// Global to shared memory; an mbarrier counts the bytes.
    Load {
        to: PtxAddress,
        from: PtxAddress,
        bytes: Register,
        barrier: PtxAddress,
    },
    /// Shared to global memory; a bulk group waits.
    Store {
        to: PtxAddress,
        from: PtxAddress,
        bytes: Register,
    },
}

/// Operands of a matrix instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Matrix {
    pub(crate) kind: MatrixKind,
    pub(crate) d: Vec<Register>,
    pub(crate) a: Vec<Register>,
    pub(crate) b: Vec<Register>,
    pub(crate) c: Vec<Register>,
    pub(crate) address: Option<PtxAddress>,
}

/// Kind of a matrix instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MatrixKind {
    /// `ldmatrix`, of 8x8 matrices of 16 bits.
    Load { transposes: bool, space: Space },
    /// `stmatrix`.
    Store { transposes: bool, space: Space },
    /// `mma.sync.m16n8`.
    Multiply {
        k: usize,
        a: Type,
        b: Type,
        accumulator: Type,
        saturates: bool,
    },
}

/// Registers and memory of a call, resolved after all functions are decoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FunctionCall {
    /// First instruction of the function.
    pub(crate) target: u32,
    /// Register that holds the function's return addresses.
    pub(crate) return_register: Register,
    /// Copies of arguments: from, to and bytes, in local memory.
    pub(crate) arguments: Vec<[u32; 3]>,
    /// Copies of results.
    pub(crate) results: Vec<[u32; 3]>,
}

/// Effect of an instruction. `d` is the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Nop,
    Move32 {
        d: Register,
        a: Register,
    },
    Move64 {
        d: Register,
        a: Register,
    },
    MovePredicate {
        d: Register,
        a: Register,
    },
    Clock {
        d: Register,
        is_wide: bool,
    },
    /// Packs two or four registers of `bits` bits into one.
    Pack {
        d: Register,
        is_wide: bool,
        bits: u8,
        parts: [Register; 4],
    },
    Unpack {
        a: Register,
        is_wide: bool,
        bits: u8,
        parts: [Register; 4],
    },
    Unary {
        op: Unary,
        ty: Type,
        flags: u8,
        d: Register,
        a: Register,
    },
    Count {
        op: Count,
        ty: Type,
        d: Register,
        a: Register,
    },
    Binary {
        op: Binary,
        ty: Type,
        flags: u8,
        d: Register,
        a: Register,
        b: Register,
    },
    Ternary {
        op: Ternary,
        ty: Type,
        flags: u8,
        d: Register,
        a: Register,
        b: Register,
        c: Register,
    },
    MultiplyWide {
        ty: Type,
        d: Register,
        a: Register,
        b: Register,
    },
    MultiplyWideAdd {
        ty: Type,
        d: Register,
        a: Register,
        b: Register,
        c: Register,
    },
    InsertBits {
        is_wide: bool,
        d: Register,
        a: Register,
        b: Register,
        start: Register,
        count: Register,
    },
    ExtractWide {
        is_signed: bool,
        d: Register,
        a: Register,
        start: Register,
        count: Register,
    },
    LogicTable {
        d: Register,
        a: Register,
        b: Register,
        c: Register,
        table: u8,
    },
    Select {
        is_wide: bool,
        d: Register,
        a: Register,
        b: Register,
        p: Register,
    },
    SelectBySign {
        is_wide: bool,
        is_float: bool,
        d: Register,
        a: Register,
        b: Register,
        c: Register,
    },
    /// Compares; `q` gets the negation. Both are combined with predicate `r`.
    Compare {
        op: Comparison,
        ty: Type,
        flags: u8,
        logic: Logic,
        negates_r: bool,
        d: Register,
        q: Register,
        a: Register,
        b: Register,
        r: Register,
    },
    /// Compares, and sets a register to all ones or 1.0 where it is true.
    CompareSet {
        op: Comparison,
        ty: Type,
        flags: u8,
        is_float: bool,
        d: Register,
        a: Register,
        b: Register,
    },
    PredicateLogic {
        op: Logic,
        d: Register,
        a: Register,
        b: Register,
    },
    PredicateNot {
        d: Register,
        a: Register,
    },
    TestNumber {
        ty: Type,
        test: NumberTest,
        d: Register,
        a: Register,
    },
    Convert {
        to: Type,
        from: Type,
        rounding: Rounding,
        to_integral: bool,
        flags: u8,
        d: Register,
        a: Register,
    },
    ConvertPair {
        to: Type,
        rounding: Rounding,
        flags: u8,
        d: Register,
        a: Register,
        b: Register,
    },
    ToGeneric {
        space: Space,
        is_wide: bool,
        d: Register,
        a: Register,
    },
    FromGeneric {
        space: Space,
        is_wide: bool,
        d: Register,
        a: Register,
    },
    IsSpace {
        space: Space,
        d: Register,
        a: Register,
    },
    LoadParameter {
        ty: Type,
        count: u8,
        d: [Register; 4],
        is_wide: [bool; 4],
        offset: u32,
    },
    Load {
        ty: Type,
        count: u8,
        space: Space,
        ordering: Ordering,
        is_wide: bool,
        d: [Register; 4],
        address: PtxAddress,
    },
    Store {
        ty: Type,
        count: u8,
        space: Space,
        ordering: Ordering,
        is_wide: bool,
        a: [Register; 4],
        address: PtxAddress,
    },
    Atomic {
        op: AtomicOp,
        ty: Type,
        space: Space,
        ordering: Ordering,
        d: Register,
        address: PtxAddress,
        b: Register,
        c: Register,
    },
    Branch {
        target: u32,
    },
    BranchIndexed {
        index: Register,
        table: u32,
    },
    Call {
        call: u32,
    },
    /// Copies the results of a call that returned here.
    TakeResults {
        call: u32,
    },
    Return {
        addresses: Register,
    },
    Exit,
    Trap,
    Barrier {
        mode: BarrierMode,
        is_aligned: bool,
        id: Register,
        count: Register,
        d: Register,
        p: Register,
        negates: bool,
    },
    WarpBarrier {
        mask: Register,
    },
    /// Waits for the kernels before this one.
    WaitForEarlier,
    Fence {
        is_wide: bool,
    },
    Shuffle {
        mode: ShuffleMode,
        d: Register,
        p: Register,
        a: Register,
        b: Register,
        c: Register,
        mask: Register,
    },
    Vote {
        mode: VoteMode,
        d: Register,
        p: Register,
        negates: bool,
        mask: Register,
    },
    ActiveMask {
        d: Register,
    },
    Match {
        is_wide: bool,
        all: bool,
        d: Register,
        p: Register,
        a: Register,
        mask: Register,
    },
    Reduce {
        op: AtomicOp,
        ty: Type,
        d: Register,
        a: Register,
        mask: Register,
    },
    Elect {
        d: Register,
        p: Register,
        mask: Register,
    },
    CopyAsync {
        bytes: u8,
        to: PtxAddress,
        from: PtxAddress,
        size: Register,
    },
    CommitCopies,
    WaitCopies {
        pending: u32,
    },
    SignalCopies {
        barrier: PtxAddress,
        is_counted: bool,
    },
    Mbarrier {
        op: MbarrierOp,
        space: Space,
        d: Register,
        address: PtxAddress,
        a: Register,
    },
    Bulk {
        copy: u32,
    },
    CommitBulk,
    WaitBulk,
    Matrix {
        index: u32,
    },
}

/// Test of `testp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NumberTest {
    Finite,
    Infinite,
    Number,
    NotNumber,
    Normal,
    Subnormal,
}

/// An instruction with its guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instruction {
    /// Predicate that lanes need, [`TRUE`] for all.
    pub(crate) guard: Register,
    pub(crate) negates: bool,
    pub(crate) action: Action,
}

/// Place of an instruction in the text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location {
    pub(crate) line: u32,
    pub(crate) start: u32,
    pub(crate) end: u32,
}

/// Value of a register that a warp finds set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Constant {
    /// A number.
    Value(u64),
    /// Address of a global variable, plus an offset.
    Global(u32, i64),
    /// Address of a shared variable within the block's memory, plus an offset.
    Shared(u32, i64),
}
