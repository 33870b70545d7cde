//! Machines drawn at random from a seed.

use crate::clock::SimClock;
use crate::device::{SimDevice, SimOptions};
use crate::environment::{SimBuggify, SimFiles, SimThreads};
use crate::world::World;
use samite_core::{BufferType, Device, DeviceKind, Environment};
use samite_testing::{RANDOM_GRAPH_OPS, Rng};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Simulated devices; the last one is the host's processor and runs everything.
pub(crate) struct Machine {
    pub world: Arc<World>,
    pub devices: Vec<Arc<SimDevice>>,
}

impl Machine {
    /// Draws a machine with up to three devices, at most `most`, besides the host's processor. A
    /// device's properties do not depend on the other devices.
    ///
    /// `change` adjusts options that the workload cannot use.
    pub fn draw(
        seed: u64,
        most: usize,
        change: impl Fn(&mut SimOptions),
        world: &Arc<World>,
    ) -> Self {
        let mut rng = Rng::new(seed);
        let count = rng.below(4).min(most);
        // Devices of one vendor copy directly between each other.
        let are_peers = rng.one_in(2);
        // Integrated devices share the processor's memory.
        let are_integrated = rng.one_in(4);
        let host = SimOptions {
            kind: DeviceKind::Cpu,
            host_memory: rng.one_in(2),
            ..SimOptions::named("host")
        };
        let mut options: Vec<_> = (0..count)
            .map(|number| SimOptions {
                host_memory: are_integrated,
                ..accelerator(number, are_peers, &mut Rng::new(rng.bits()))
            })
            .collect();
        options.push(host);
        options.iter_mut().for_each(change);
        for options in &options {
            world.with(|state| state.note(|_| format!("{options:?}")));
        }
        let devices: Vec<_> = options
            .into_iter()
            .map(|options| SimDevice::new(world, options))
            .collect();
        for device in devices
            .iter()
            .filter(|device| device.options.copies_to_peers)
        {
            for other in &devices {
                if other.options.copies_to_peers && !Arc::ptr_eq(device, other) {
                    device.add_peer(other.buffer_type());
                }
            }
        }
        Machine {
            world: Arc::clone(world),
            devices,
        }
    }

    /// Returns the devices, for a scheduler.
    pub fn devices(&self) -> Vec<Arc<dyn Device>> {
        let devices = self.devices.iter();
        devices
            .map(|device| Arc::clone(device) as Arc<dyn Device>)
            .collect()
    }

    /// Returns the memory types of the devices that are not lost.
    pub fn memories(&self) -> Vec<Arc<dyn BufferType>> {
        let lost = self.world.with(|state| state.lost_devices());
        let there = |device: &&Arc<SimDevice>| !lost.contains(&device.options.name);
        let devices = self.devices.iter().filter(there);
        devices.map(|device| device.buffer_type()).collect()
    }

    /// Returns an environment with simulated time, threads and files.
    pub fn environment(&self, files: BTreeMap<PathBuf, Arc<[u8]>>) -> Environment {
        Environment {
            clock: Arc::new(SimClock::new(&self.world)),
            files: Arc::new(SimFiles::new(&self.world, files)),
            threads: Arc::new(SimThreads::new(&self.world, 3)),
            buggify: Arc::new(SimBuggify(Arc::clone(&self.world))),
            ..Environment::system()
        }
    }
}

fn accelerator(number: usize, are_peers: bool, rng: &mut Rng) -> SimOptions {
    let asynchronous = !rng.one_in(4);
    let some = |rng: &mut Rng, n: usize| {
        // Operations that the device may lack or falsely claim to support.
        let names = RANDOM_GRAPH_OPS.iter().filter(|_| rng.one_in(n));
        names.map(|&name| name.to_owned()).collect::<Vec<_>>()
    };
    let copies = !rng.one_in(3);
    SimOptions {
        asynchronous,
        events: !rng.one_in(3),
        copies,
        copies_to_peers: copies && are_peers,
        streams: rng.one_in(2),
        compiles: rng.one_in(2),
        wants_offload: rng.one_in(3),
        import_host: rng.one_in(2),
        alignment: rng.pick(&[1, 32, 256]),
        max_buffer_size: if rng.one_in(3) {
            16 << 10
        } else {
            isize::MAX as usize
        },
        workspace: rng.pick(&[0, 0, 512]),
        without_ops: some(rng, 5),
        lies_about: if rng.one_in(20) {
            some(rng, 10)
        } else {
            Vec::new()
        },
        ..SimOptions::named(&format!("d{number}"))
    }
}
