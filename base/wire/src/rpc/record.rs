//! Tensor records of messages: 296 bytes.

use super::Fields;
use crate::numbers::{MAX_DIMS, MAX_NAME, MAX_OP_PARAMS, MAX_SRC, Release};
use crate::{Description, UnsupportedConversion};

/// Bytes of a record.
pub const RECORD: usize = 296;

/// A tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Identity for other records of a graph, or 0.
    pub id: u64,
    /// Number of the element type.
    pub dtype: u32,
    /// Id of its buffer, or 0.
    pub buffer: u64,
    /// Extents.
    pub ne: [u32; MAX_DIMS],
    /// Byte strides.
    pub nb: [u32; MAX_DIMS],
    /// Number of the operation.
    pub op: u32,
    /// Parameters of the operation.
    pub op_params: [i32; MAX_OP_PARAMS],
    /// Roles.
    pub flags: i32,
    /// Ids of the operands, or 0.
    pub src: [u64; MAX_SRC],
    /// Id of the tensor in whose memory it lies, or 0.
    pub view_src: u64,
    /// Offset in that tensor.
    pub view_offs: u64,
    /// Address of its first byte: that of its buffer plus an offset.
    pub data: u64,
    /// Name, padded with zeros.
    pub name: [u8; MAX_NAME],
    /// Number of operands in the whole graph that refer to it.
    pub use_count: i32,
}

impl Record {
    /// A record of zeros.
    pub const NONE: Record = Record {
        id: 0,
        dtype: 0,
        buffer: 0,
        ne: [0; MAX_DIMS],
        nb: [0; MAX_DIMS],
        op: 0,
        op_params: [0; MAX_OP_PARAMS],
        flags: 0,
        src: [0; MAX_SRC],
        view_src: 0,
        view_offs: 0,
        data: 0,
        name: [0; MAX_NAME],
        use_count: 0,
    };

    /// Returns a tensor without memory, name and references, in the numbers of `release`.
    ///
    /// # Errors
    /// If an extent or a stride does not fit into 32 bits, or the release lacks the operation or
    /// the element type.
    pub fn from_description(
        tensor: &Description,
        release: &Release,
    ) -> Result<Self, UnsupportedConversion> {
        let tensor = &release.lower(tensor)?;
        let mut record = Record {
            dtype: tensor.dtype,
            op: tensor.op,
            op_params: tensor.op_params,
            flags: tensor.flags,
            ..Record::NONE
        };
        let too_large = |what, number: i128| {
            UnsupportedConversion::from(format!(
                "{what} {number} does not fit into the 32 bits that the protocol has for it"
            ))
        };
        for (to, from) in record.ne.iter_mut().zip(tensor.ne) {
            *to = u32::try_from(from).map_err(|_| too_large("extent", from.into()))?;
        }
        for (dim, (to, from)) in record.nb.iter_mut().zip(tensor.nb).enumerate() {
            *to = match u32::try_from(from) {
                Ok(stride) => stride,
                // No address depends on it.
                Err(_) if tensor.ne[dim] <= 1 => 0,
                Err(_) => return Err(too_large("stride", from as i128)),
            };
        }
        Ok(record)
    }

    /// Returns the tensor's description. The record has the numbers of `release`.
    pub fn description(&self, release: &Release) -> Description {
        release.lift(Description {
            dtype: self.dtype,
            ne: self.ne.map(i64::from),
            nb: self.nb.map(|stride| stride as usize),
            op: self.op,
            op_params: self.op_params,
            flags: self.flags,
            is_view: self.view_src != 0,
        })
    }

    /// Returns the name, with characters that are not UTF-8 replaced.
    pub fn name(&self) -> String {
        let len = self.name.iter().position(|&byte| byte == 0);
        String::from_utf8_lossy(&self.name[..len.unwrap_or(MAX_NAME)]).into_owned()
    }

    /// Sets the name, truncated to fit.
    pub fn set_name(&mut self, name: &str) {
        self.name = [0; MAX_NAME];
        let len = name.floor_char_boundary(MAX_NAME - 1);
        self.name[..len].copy_from_slice(&name.as_bytes()[..len]);
    }

    /// Appends the bytes.
    pub fn write(&self, out: &mut Vec<u8>) {
        let mut bytes = [0; RECORD];
        let mut rest = &mut bytes[..];
        // Graph queries consist of thousands of these, so each record is copied only once.
        let mut put = |field: &[u8]| {
            if let Some(to) = rest.split_off_mut(..field.len()) {
                to.copy_from_slice(field);
            }
        };
        put(&self.id.to_le_bytes());
        put(&self.dtype.to_le_bytes());
        put(&self.buffer.to_le_bytes());
        self.ne.iter().for_each(|n| put(&n.to_le_bytes()));
        self.nb.iter().for_each(|n| put(&n.to_le_bytes()));
        put(&self.op.to_le_bytes());
        let params = self.op_params.iter();
        params.for_each(|word| put(&word.to_le_bytes()));
        put(&self.flags.to_le_bytes());
        self.src.iter().for_each(|id| put(&id.to_le_bytes()));
        put(&self.view_src.to_le_bytes());
        put(&self.view_offs.to_le_bytes());
        put(&self.data.to_le_bytes());
        put(&self.name);
        put(&self.use_count.to_le_bytes());
        out.extend_from_slice(&bytes);
    }

    /// Parses a record.
    ///
    /// # Errors
    /// If the message ends too early.
    pub fn read(fields: &mut Fields<'_>) -> Result<Self, UnsupportedConversion> {
        let mut record = Record::NONE;
        record.id = fields.u64()?;
        record.dtype = fields.u32()?;
        record.buffer = fields.u64()?;
        for extent in &mut record.ne {
            *extent = fields.u32()?;
        }
        for stride in &mut record.nb {
            *stride = fields.u32()?;
        }
        record.op = fields.u32()?;
        for word in &mut record.op_params {
            *word = fields.i32()?;
        }
        record.flags = fields.i32()?;
        for source in &mut record.src {
            *source = fields.u64()?;
        }
        record.view_src = fields.u64()?;
        record.view_offs = fields.u64()?;
        record.data = fields.u64()?;
        record.name = fields.bytes()?;
        record.use_count = fields.i32()?;
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::V25;

    #[test]
    fn field_offsets_match_upstream() {
        // One byte at the start of each field.
        let fields = [
            (0, "id"),
            (8, "dtype"),
            (12, "buffer"),
            (20, "ne"),
            (36, "nb"),
            (52, "op"),
            (56, "op_params"),
            (120, "flags"),
            (124, "src"),
            (204, "view_src"),
            (212, "view_offs"),
            (220, "data"),
            (228, "name"),
            (292, "use_count"),
        ];
        for (at, name) in fields {
            let mut bytes = vec![0; RECORD];
            bytes[at] = 1;
            let record = Record::read(&mut Fields::new(&bytes)).unwrap();
            let found = match name {
                "id" => record.id == 1,
                "dtype" => record.dtype == 1,
                "buffer" => record.buffer == 1,
                "ne" => record.ne[0] == 1,
                "nb" => record.nb[0] == 1,
                "op" => record.op == 1,
                "op_params" => record.op_params[0] == 1,
                "flags" => record.flags == 1,
                "src" => record.src[0] == 1,
                "view_src" => record.view_src == 1,
                "view_offs" => record.view_offs == 1,
                "data" => record.data == 1,
                "name" => record.name[0] == 1,
                _ => record.use_count == 1,
            };
            assert!(found, "{name}");
            let mut again = Vec::new();
            record.write(&mut again);
            assert_eq!(again, bytes, "{name}");
            assert!(Record::read(&mut Fields::new(&bytes[1..])).is_err());
        }
    }

    #[test]
    fn invalid_sizes_are_refused() {
        let mut tensor = Description {
            ne: [4, 1, 1, 1],
            nb: [4, 1 << 40, 1 << 40, 1 << 40],
            ..Description::default()
        };
        assert_eq!(
            Record::from_description(&tensor, &V25).unwrap().nb,
            [4, 0, 0, 0]
        );
        tensor.ne[1] = 2;
        assert!(
            Record::from_description(&tensor, &V25)
                .unwrap_err()
                .contains("stride")
        );
        tensor.ne[0] = 1 << 32;
        assert!(
            Record::from_description(&tensor, &V25)
                .unwrap_err()
                .contains("extent")
        );
        tensor.ne[0] = -1;
        assert!(Record::from_description(&tensor, &V25).is_err());
    }

    #[test]
    fn names_are_truncated_at_character_boundaries() {
        let mut record = Record::NONE;
        record.set_name(&"ä".repeat(40));
        assert_eq!(record.name(), "ä".repeat(31));
        record.name = [b'x'; MAX_NAME];
        assert_eq!(record.name().len(), MAX_NAME, "no zero behind it");
    }
}
