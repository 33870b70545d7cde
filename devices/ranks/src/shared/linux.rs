use super::SharedError;
use memmap2::MmapMut;
use samite_core::{Error, Result};
use samite_meta::comm::Transport;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Size of a buffer in bytes.
const BUFFER: usize = 256 << 10;
/// Size of the head before the buffers: global words, then a cache line for each process. Rank `r`
/// locks byte `r` of the file.
const HEAD: usize = 64 << 10;
/// Size in bytes of each process's line in the head.
const LINE: usize = 128;
/// Maximum number of processes.
const MOST: usize = HEAD / LINE - 1;
/// Number of polls for progress between two checks that the processes are alive.
const PATIENCE: u32 = 256;
/// First word of the file: a magic number and the layout's version.
const MAGIC: u64 = u64::from_le_bytes(*b"samite\0\x01");

/// The mapped file.
struct MappedFile {
    map: MmapMut,
}

impl MappedFile {
    /// Returns a word of the head.
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at + 8 <= HEAD && at.is_multiple_of(8));
        // SAFETY: the map is longer than its head and page-aligned, so the word is aligned and
        // within it. All processes only access these words atomically. The lifetime is that of the
        // map.
        unsafe { AtomicU64::from_ptr(self.map.as_ptr().cast_mut().add(at).cast()) }
    }

    /// Returns the magic word: [`MAGIC`] once the file is complete.
    fn magic(&self) -> &AtomicU64 {
        self.word(0)
    }

    /// Returns the number of processes.
    fn size(&self) -> &AtomicU64 {
        self.word(8)
    }

    /// Returns the rank that aborted, plus one; 0 for none.
    fn aborted(&self) -> &AtomicU64 {
        self.word(16)
    }

    /// Returns the rank that was found to have exited, plus one; 0 for none.
    fn ended(&self) -> &AtomicU64 {
        self.word(24)
    }

    /// Returns the number of chunks that a process has written, plus one once it has joined.
    fn put(&self, rank: usize) -> &AtomicU64 {
        self.word((rank + 1) * LINE)
    }

    /// Returns the start of a buffer.
    fn buffer(&self, rank: usize, turn: u64) -> *mut u8 {
        let number = 2 * rank + usize::from(turn % 2 == 1);
        let at = HEAD + number * BUFFER;
        assert!(at + BUFFER <= self.map.len());
        // SAFETY: the buffer is within the map.
        unsafe { self.map.as_ptr().cast_mut().add(at) }
    }

    fn bytes(size: usize) -> usize {
        HEAD + 2 * size * BUFFER
    }
}

/// A process's end of the transport.
pub(super) struct Shared {
    /// Open file, whose lock shows that this process is alive.
    file: File,
    map: MappedFile,
    rank: usize,
    size: usize,
    /// Number of chunks that this process has written.
    count: u64,
    sent: Vec<u8>,
    lens: Vec<usize>,
    gathered: Vec<u8>,
    /// Index of the chunk in progress, and the number of chunks; equal if no round is in progress.
    piece: usize,
    pieces: usize,
    tests: u32,
}

/// Returns a lock request of type `kind` for a byte.
fn lock(kind: i32, byte: usize) -> libc::flock {
    libc::flock {
        l_type: kind as _,
        l_whence: libc::SEEK_SET as _,
        l_start: byte as _,
        l_len: 1,
        l_pid: 0,
    }
}

/// Locks a byte. Returns `false` if another open file holds its lock.
fn take(file: &File, byte: usize) -> std::io::Result<bool> {
    let mut wanted = lock(libc::F_WRLCK, byte);
    // SAFETY: the descriptor is open, and the structure is the one this command requires.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &mut wanted) } {
        0 => Ok(true),
        _ => match std::io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
            error => Err(error),
        },
    }
}

/// Returns whether another open file holds a byte's lock.
fn is_taken(file: &File, byte: usize) -> bool {
    let mut found = lock(libc::F_WRLCK, byte);
    // SAFETY: see `take`.
    let failed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut found) } != 0;
    failed || found.l_type != libc::F_UNLCK as libc::c_short
}

impl Shared {
    pub fn start(
        path: &Path,
        rank: usize,
        size: usize,
        deadline: Duration,
    ) -> std::result::Result<Self, SharedError> {
        if size > MOST || rank >= size {
            let what = format!("rank {rank} of {size}");
            return Err(SharedError::Environment(what));
        }
        let start = Instant::now();
        let file = match rank {
            0 => make(path, size)?,
            _ => loop {
                if let Some(file) = join(path, rank, size)? {
                    break file;
                }
                if start.elapsed() > deadline {
                    return Err(others(
                        path,
                        "rank 0 did not come: start all processes with the same file",
                    ));
                }
                std::thread::sleep(Duration::from_millis(5));
            },
        };
        // SAFETY: the file is as long as the map. Only processes of the same user that share it
        // could truncate it, and none does.
        let map = unsafe { MmapMut::map_mut(&file) };
        let map = MappedFile {
            map: map.map_err(|error| refused(path, "mapping", error))?,
        };
        if rank == 0 {
            map.size().store(size as u64, Ordering::Relaxed);
            map.magic().store(MAGIC, Ordering::Release);
        }
        let shared = Shared {
            file,
            map,
            rank,
            size,
            count: 1,
            sent: Vec::new(),
            lens: Vec::new(),
            gathered: Vec::new(),
            piece: 0,
            pieces: 0,
            tests: 0,
        };
        while shared.map.magic().load(Ordering::Acquire) != MAGIC {
            if start.elapsed() > deadline || !is_taken(&shared.file, 0) {
                return Err(others(path, "rank 0 did not finish the file"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let wanted = shared.map.size().load(Ordering::Relaxed);
        if wanted != size as u64 {
            let what = format!(
                "rank 0 counts {wanted} processes, and rank {rank} {size}: SAMITE_RANKS must be the same for all"
            );
            return Err(others(path, &what));
        }
        shared.map.put(rank).store(1, Ordering::Release);
        while let Some(missing) = shared.first_behind() {
            if start.elapsed() > deadline {
                let what = format!(
                    "rank {missing} did not come within {} s: start all processes with the same file",
                    deadline.as_secs_f32()
                );
                return Err(others(path, &what));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if rank == 0 {
            // The name is no longer needed, and nothing remains however the processes exit.
            let _ = std::fs::remove_file(path);
        }
        Ok(shared)
    }

    /// Returns the ranks that have written fewer chunks than this one.
    fn behind(&self) -> impl Iterator<Item = usize> {
        (0..self.size).filter(|&rank| self.map.put(rank).load(Ordering::Acquire) < self.count)
    }

    fn first_behind(&self) -> Option<usize> {
        self.behind().next()
    }

    /// Describes that `rank` aborted, and which ranks it was waiting for as seen from here: its
    /// deadline may have passed just before this process's own.
    fn given_up(&self, rank: usize) -> String {
        let others: Vec<_> = self.behind().filter(|&other| other != rank).collect();
        match &others[..] {
            [] => format!("rank {rank} gave up"),
            [other] => format!("rank {rank} gave up: rank {other} did not come to it"),
            others => {
                let others: Vec<_> = others.iter().map(usize::to_string).collect();
                let others = others.join(", ");
                format!("rank {rank} gave up: ranks {others} did not come to it")
            }
        }
    }

    /// Writes a chunk of this process's data.
    fn put(&mut self) {
        let start = (self.piece * BUFFER).min(self.sent.len());
        let bytes = &self.sent[start..self.sent.len().min(start + BUFFER)];
        let to = self.map.buffer(self.rank, self.count);
        // SAFETY: the buffer has room for a chunk, and the two do not overlap. No process reads
        // this buffer: its last chunk was the one before the previous. Every process has read that
        // before writing the previous one, which this process has observed.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        self.count += 1;
        self.map.put(self.rank).store(self.count, Ordering::Release);
    }

    /// Reads a chunk of every process's data.
    fn read(&mut self) {
        let mut at = 0;
        for (rank, &len) in self.lens.iter().enumerate() {
            let start = (self.piece * BUFFER).min(len);
            let part = &mut self.gathered[at + start..at + len.min(start + BUFFER)];
            let from = self.map.buffer(rank, self.count - 1);
            // SAFETY: a chunk is no longer than the buffer. Its owner wrote it before incrementing
            // its counter, which this process has observed, and overwrites it only after this
            // process has written two more.
            unsafe { std::ptr::copy_nonoverlapping(from, part.as_mut_ptr(), part.len()) };
            at += len;
        }
    }
}

fn refused(path: &Path, what: &'static str, error: std::io::Error) -> SharedError {
    SharedError::System {
        path: path.display().to_string(),
        what,
        error,
    }
}

fn others(path: &Path, what: &str) -> SharedError {
    SharedError::Others {
        path: path.display().to_string(),
        what: what.to_owned(),
    }
}

/// Creates the file. It gets its name only after its creator holds the lock.
fn make(path: &Path, size: usize) -> std::result::Result<File, SharedError> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    let unnamed = Path::new(&name);
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create_new(true).mode(0o600);
    let file = options
        .open(unnamed)
        .map_err(|error| refused(path, "making the file", error))?;
    // Allocate all of it now: a page that is missing later would kill the process. SAFETY: the
    // descriptor is open.
    let failed =
        unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, MappedFile::bytes(size) as _) };
    let made = match failed {
        0 => take(&file, 0).and_then(|_| std::fs::rename(unnamed, path)),
        code => Err(std::io::Error::from_raw_os_error(code)),
    };
    made.map_err(|error| {
        let _ = std::fs::remove_file(unnamed);
        refused(path, "making the file", error)
    })?;
    Ok(file)
}

/// Opens the file and locks this rank's byte. Returns `None` if the file does not exist yet or was
/// left by processes that have exited.
fn join(path: &Path, rank: usize, size: usize) -> std::result::Result<Option<File>, SharedError> {
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.map_err(|error| refused(path, "opening", error))?,
    };
    let about = file
        .metadata()
        .map_err(|error| refused(path, "opening", error))?;
    if !is_taken(&file, 0) {
        return Ok(None);
    }
    if !about.is_file() || about.len() < MappedFile::bytes(1) as u64 {
        return Err(others(
            path,
            "it is no file that processes share: name another one",
        ));
    }
    if about.len() != MappedFile::bytes(size) as u64 {
        let what = format!("it is not for {size} processes: SAMITE_RANKS must be the same for all");
        return Err(others(path, &what));
    }
    if take(&file, rank).map_err(|error| refused(path, "locking", error))? {
        Ok(Some(file))
    } else {
        Err(others(
            path,
            &format!("there is a rank {rank} already: SAMITE_RANK must differ"),
        ))
    }
}

impl Transport for Shared {
    fn name(&self) -> String {
        "shared memory".to_owned()
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn begin(&mut self, head: &[u8], body: &[u8], lens: &[usize]) -> Result<()> {
        let own = head.len() + body.len();
        let total = lens
            .iter()
            .try_fold(0_usize, |sum, len| sum.checked_add(*len));
        let is_free = self.piece == self.pieces && lens.len() == self.size;
        let Some(total) = total.filter(|_| is_free && lens[self.rank] == own) else {
            return Err(Error::invalid("a gathering that cannot begin"));
        };
        let room = |list: &mut Vec<u8>, len: usize| {
            let more = len.saturating_sub(list.len());
            list.try_reserve(more).map_err(|_| Error::OutOfMemory {
                device: "host".into(),
                what: "what processes exchange".into(),
                asked: len,
                free: None,
            })
        };
        self.sent.clear();
        room(&mut self.sent, own)?;
        self.sent.extend_from_slice(head);
        self.sent.extend_from_slice(body);
        room(&mut self.gathered, total)?;
        self.gathered.resize(total, 0);
        lens.clone_into(&mut self.lens);
        let longest = lens.iter().copied().max().unwrap_or(0);
        (self.piece, self.pieces) = (0, longest.div_ceil(BUFFER).max(1));
        self.put();
        Ok(())
    }

    fn test(&mut self) -> Result<bool> {
        while self.piece < self.pieces {
            if let Some(missing) = self.first_behind() {
                self.tests = self.tests.wrapping_add(1);
                let is_time = self.tests.is_multiple_of(PATIENCE);
                // Chunks written before its exit count.
                if is_time && !is_taken(&self.file, missing) && self.first_behind() == Some(missing)
                {
                    self.map
                        .ended()
                        .store(missing as u64 + 1, Ordering::Release);
                }
                // An abort may itself be caused by a process that exited.
                let gave_up = self.map.aborted().load(Ordering::Acquire);
                let ended = self.map.ended().load(Ordering::Acquire);
                let message = match (ended, gave_up) {
                    (0, 0) => return Ok(false),
                    (0, rank) => self.given_up(rank as usize - 1),
                    (rank, _) => format!("rank {} ended", rank - 1),
                };
                return Err(Error::device("ranks", message));
            }
            self.read();
            self.piece += 1;
            if self.piece < self.pieces {
                self.put();
            }
        }
        Ok(true)
    }

    fn missing(&mut self) -> Vec<usize> {
        self.behind().collect()
    }

    fn gathered(&self) -> &[u8] {
        &self.gathered
    }

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }

    fn abort(&mut self, _: i32) {
        let me = self.rank as u64 + 1;
        self.map.aborted().store(me, Ordering::Release);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // test helpers may unwrap
mod tests {
    use super::*;
    use samite_meta::comm::{ProcessGroup, ProcessOptions};

    const LONG: Duration = Duration::from_secs(60);
    /// Timeout for tests that wait for it to expire.
    const PATIENT: Duration = Duration::from_secs(3);

    /// Runs `work` as every rank, in threads that each open the file.
    fn together<T: Send>(size: usize, work: impl Fn(Shared) -> T + Sync) -> Vec<T> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ranks");
        // A file left by processes that have exited.
        std::fs::write(&path, vec![1; MappedFile::bytes(size)]).unwrap();
        let results = std::thread::scope(|scope| {
            let start = |rank| {
                let (path, work) = (&path, &work);
                scope.spawn(move || work(Shared::start(path, rank, size, LONG).unwrap()))
            };
            let all: Vec<_> = (0..size).rev().map(start).collect();
            all.into_iter().rev().map(|p| p.join().unwrap()).collect()
        });
        assert!(!path.exists(), "its name is gone");
        results
    }

    fn gather(end: &mut Shared, mine: &[u8], lens: &[usize]) -> Result<Vec<u8>> {
        end.begin(&[], mine, lens)?;
        while !end.test()? {
            std::thread::yield_now();
        }
        Ok(end.gathered().to_vec())
    }

    #[test]
    fn gathers_work_for_any_size() {
        for size in 1..5 {
            let lists: Vec<Vec<usize>> = [0, 1, 7, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER + 5]
                .iter()
                .flat_map(|&len| {
                    let mut uneven = vec![0; size];
                    uneven[len % size] = len;
                    [vec![len; size], uneven]
                })
                .collect();
            let byte = |rank: usize, i: usize| (i * 7 + rank * 31) as u8;
            let part = |rank, len| (0..len).map(|i| byte(rank, i)).collect::<Vec<u8>>();
            together(size, |mut end| {
                for lens in &lists {
                    let mine = part(end.rank, lens[end.rank]);
                    let all: Vec<u8> = (0..size).flat_map(|rank| part(rank, lens[rank])).collect();
                    assert!(gather(&mut end, &mine, lens).unwrap() == all, "{lens:?}");
                }
                assert!(end.begin(&[], &[1], &vec![0; size]).is_err());
            });
        }
    }

    #[test]
    fn buffers_are_not_reused_before_all_members_read_them() {
        together(3, |mut end| {
            for i in 0..20_000_u32 {
                let mine = [i.to_le_bytes(), (end.rank as u32).to_le_bytes()].concat();
                let all = gather(&mut end, &mine, &[8; 3]).unwrap();
                for (rank, theirs) in all.chunks(8).enumerate() {
                    assert_eq!(theirs[..4], i.to_le_bytes());
                    assert_eq!(theirs[4..], (rank as u32).to_le_bytes());
                }
            }
        });
    }

    #[test]
    fn exited_and_aborting_ranks_are_named() {
        for gives_up in [false, true] {
            let over = std::sync::Barrier::new(3);
            let said = together(3, |mut end| match end.rank {
                1 => {
                    if gives_up {
                        // Keep this process alive until the others have read the abort.
                        end.abort(1);
                        over.wait();
                    }
                    String::new()
                }
                _ => {
                    let group = ProcessGroup::new(Box::new(end), ProcessOptions::default());
                    let said = group.agree("number", 1).unwrap_err().to_string();
                    if gives_up {
                        over.wait();
                    }
                    said
                }
            });
            let wanted = if gives_up {
                "rank 1 gave up"
            } else {
                "rank 1 ended"
            };
            assert!(
                said[0].contains(wanted) && said[2].contains(wanted),
                "{said:?}"
            );
        }
    }

    #[test]
    fn timeouts_name_the_awaited_rank_to_the_others() {
        let over = std::sync::Barrier::new(3);
        let said = together(3, |end| {
            // Rank 1 has joined and does nothing; the deadline of rank 2 is first.
            let deadline = Duration::from_millis(if end.rank == 2 { 50 } else { 60_000 });
            let is_late = end.rank == 1;
            let options = ProcessOptions {
                deadline,
                ..ProcessOptions::default()
            };
            let group = ProcessGroup::new(Box::new(end), options);
            let mut said = String::new();
            if !is_late {
                said = group.agree("number", 1).unwrap_err().to_string();
                group.abort_all(1);
            }
            over.wait();
            said
        });
        assert!(said[2].contains("rank 1 did not come to"), "{said:?}");
        let wanted = "rank 2 gave up: rank 1 did not come to it";
        assert!(said[0].contains(wanted), "{said:?}");
    }

    #[test]
    fn data_written_before_exit_is_still_read() {
        for _ in 0..200 {
            together(2, |mut end| {
                let rank = end.rank as u8;
                assert_eq!(gather(&mut end, &[rank], &[1; 2]).unwrap(), [0, 1]);
            });
        }
    }

    #[test]
    fn invalid_ranks_and_sizes_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ranks");
        let short = Duration::from_millis(200);
        let error = |rank, size| {
            Shared::start(&path, rank, size, short)
                .err()
                .unwrap()
                .to_string()
        };
        assert!(error(2, 2).contains("SAMITE_RANK"));
        assert!(error(1, 2).contains("rank 0 did not come"));
        std::thread::scope(|scope| {
            let first = scope.spawn(|| Shared::start(&path, 0, 3, PATIENT).err());
            while !path.exists() {
                std::thread::yield_now();
            }
            assert!(error(1, 2).contains("it is not for 2 processes"));
            // Either of the two may come first.
            let second =
                [(); 2].map(|()| scope.spawn(|| Shared::start(&path, 1, 3, PATIENT).err()));
            let second = second.map(|second| second.join().unwrap().unwrap().to_string());
            let is_refused = |said: &&String| said.contains("there is a rank 1 already");
            assert_eq!(second.iter().filter(is_refused).count(), 1, "{second:?}");
            let said = first.join().unwrap().unwrap().to_string();
            assert!(said.contains("rank 2 did not come"), "{said}");
        });
    }
}
