//! Entry point for fuzz targets: a peer's bytes without a connection.

use crate::{publisher, zmtp};

/// Serves a peer that sends a greeting if `is_greeted`, then these bytes, and disconnects. Returns
/// why the connection ends.
pub fn serve(bytes: &[u8], is_replay: bool, is_greeted: bool) -> std::io::Result<()> {
    let mut sent = Vec::new();
    if is_greeted {
        sent.extend(zmtp::greeting());
        sent.extend(zmtp::ready(if is_replay { "REQ" } else { "SUB" }));
    }
    sent.extend_from_slice(bytes);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    runtime.block_on(publisher::serve_bytes(&sent, is_replay))
}
