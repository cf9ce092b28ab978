//! Sharing between containers: processes in separate user, network, PID, IPC and mount namespaces. They have only a directory or an
//! inherited descriptor in common. None has a `/proc` of its own PID namespace.
//!
//! If the system refuses such namespaces to users, the tests say so and pass. `HIGHWATER_NAMESPACES=required` makes them fail.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use highwater_core::{ErrorKind, Openers, Rendezvous, Runtime, RuntimeOptions, SharingOptions, Ticket};
use highwater_mock::{MockGpu, MockOptions};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::hostile::{HELLO, forged};
use crate::peer::{Peer, until};

/// Namespaces with the user as their root.
const MAPPED: &str = "-Urnpifm";
/// Namespaces in which no user has an id.
const UNMAPPED: &str = "-Unpifm";

/// Returns whether this user may make namespaces. Says so if not.
fn has_namespaces() -> bool {
    let tried = Command::new("unshare").args([MAPPED, "true"]).output();
    let why = match tried {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    let required = std::env::var_os("HIGHWATER_NAMESPACES").is_some_and(|value| value == "required");
    assert!(!required, "`unshare {MAPPED} true`: {why}");
    eprintln!("skipped: this system refuses user namespaces (`unshare {MAPPED} true`: {why})");
    false
}

/// A directory that is empty at the end of its test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // Not with the project's name: another test checks that this process has no such file open.
        let name = format!("test-of-containers-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    fn sharing(&self, more: &str) -> String {
        format!("rendezvous=directory:{}{more}", self.0.display())
    }

    fn path(&self) -> &'static Path {
        Box::leak(self.0.clone().into_boxed_path())
    }

    fn files(&self) -> usize {
        std::fs::read_dir(&self.0).unwrap().count()
    }

    #[track_caller]
    fn end(self) {
        assert_eq!(self.files(), 0, "files were left");
        std::fs::remove_dir(&self.0).unwrap();
    }
}

/// Changes a command so that it runs in namespaces of its own, with these options of sharing.
fn contain(command: &mut Command, namespaces: &str, sharing: &str) {
    let mut contained = Command::new("unshare");
    contained.args([namespaces, "--kill-child", "--"]).arg(command.get_program()).args(command.get_args());
    contained.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    contained.env("HIGHWATER_SHARING", sharing).env("TMPDIR", "/nowhere");
    contained.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    *command = contained;
}

fn container(namespaces: &str, sharing: &str) -> Peer {
    Peer::start_with("", |command| contain(command, namespaces, sharing))
}

/// Makes a command run as on a kernel before Linux 6.5, which lacks `SO_PEERPIDFD`.
fn on_an_old_kernel(command: &mut Command) {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let load = |offset: u32| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    let unless = |k: u32, jf: u8| {
        let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        libc::sock_filter { code, jt: 0, jf, k }
    };
    let end = |action: u32| statement(libc::BPF_RET | libc::BPF_K, action);
    // `seccomp_data`: the number, the architecture, the instruction, the arguments of 64 bits each. The third one is the option.
    let mut filter = [
        load(0),
        unless(libc::SYS_getsockopt as u32, 3),
        load(16 + 8 * 2),
        unless(libc::SO_PEERPIDFD as u32, 1),
        end(libc::SECCOMP_RET_ERRNO | libc::ENOPROTOOPT as u32),
        end(libc::SECCOMP_RET_ALLOW),
    ];
    let set = move || {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the calls only read their arguments, and the filter lives until they return.
        let loaded = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
        };
        if loaded { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec the child only makes system calls.
    unsafe { command.pre_exec(set) };
}

/// Two containers share memory, in which each survives the death of the other. `start` starts the exporter or an importer.
fn share_and_die(mut start: impl FnMut(Side) -> Peer) {
    let mut exporter = start(Side::Exporter);
    let ticket = exporter.tell("make a 1000 7");
    let mut importer = start(Side::Importer);
    assert_eq!(importer.tell(&format!("open a {ticket}")), "1000");
    assert_eq!(importer.tell("read a"), "7");
    // Both write to the same memory.
    importer.tell("fill a 8 1");
    importer.tell("read a");
    assert_eq!(exporter.tell("read a"), "8");

    // The importer dies, and the memory that only it held is free.
    exporter.tell("drop a");
    assert!(exporter.tell("statistics").contains("limbo=1 peers=1"), "{}", exporter.tell("statistics"));
    importer.kill();
    until("the dead importer holds nothing", || exporter.tell("statistics").contains("limbo=0 peers=0"));

    // The exporter dies. The importer learns it, and keeps its mapping.
    let ticket = exporter.tell("make b 1000 9");
    let mut importer = start(Side::Importer);
    importer.tell(&format!("open b {ticket}"));
    exporter.kill();
    until("the importer knows of the death", || importer.tell("statistics").contains("lost=1"));
    assert_eq!(importer.tell("read b"), "9");
    let answer = importer.ask(&format!("open c {ticket}"));
    assert!(answer.starts_with("error Expired"), "{answer}");
    assert!(importer.quit().success());
}

#[derive(Clone, Copy, PartialEq)]
enum Side {
    Exporter,
    Importer,
}

#[test]
fn two_containers_share_by_a_directory_and_nothing_else() {
    if !has_namespaces() {
        return;
    }
    let folder = Folder::new();
    share_and_die(|_| container(MAPPED, &folder.sharing("")));
    // The file of the killed exporter is removed by the next one, whose own file goes with it.
    assert_eq!(folder.files(), 1);
    // A file of the same form that is no socket stays.
    let dead = std::fs::read_dir(&folder.0).unwrap().next().unwrap().unwrap().path();
    let (start, hex) = dead.to_str().unwrap().rsplit_once('-').unwrap();
    let other = format!("{start}-{}", "0".repeat(hex.len()));
    std::fs::write(&other, "kept").unwrap();
    let mut next = container(MAPPED, &folder.sharing(""));
    next.tell("make a 10 1");
    assert_eq!(folder.files(), 2);
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "kept");
    std::fs::remove_file(&other).unwrap();
    // A live exporter keeps its file.
    let mut another = container(MAPPED, &folder.sharing(""));
    let ticket = another.tell("make a 10 1");
    assert_eq!(folder.files(), 2);
    assert_eq!(next.tell(&format!("open b {ticket}")), "10");
    next.tell("drop b");
    assert!(next.quit().success() && another.quit().success());
    folder.end();
}

/// Returns a pair of sockets that processes which this one starts may inherit.
fn inherited_pair() -> (OwnedFd, OwnedFd) {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// Makes a command inherit a descriptor.
fn inherit(command: &mut Command, descriptor: i32) {
    // SAFETY: between fork and exec the child makes one system call.
    unsafe {
        command.pre_exec(move || match libc::fcntl(descriptor, libc::F_SETFD, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    };
}

fn share_by_descriptor(change: impl Fn(&mut Command)) {
    let (exporters, importers) = inherited_pair();
    share_and_die(|side| {
        let number = if side == Side::Exporter { exporters.as_raw_fd() } else { importers.as_raw_fd() };
        Peer::start_with("", |command| {
            contain(command, MAPPED, &format!("rendezvous=descriptor:{number}"));
            inherit(command, number);
            change(command);
        })
    });
}

#[test]
fn two_containers_share_by_an_inherited_descriptor_and_nothing_else() {
    if has_namespaces() {
        share_by_descriptor(|_| {});
    }
}

#[test]
fn containers_share_on_a_kernel_that_names_no_process_at_the_other_end_of_a_socket() {
    if !has_namespaces() {
        return;
    }
    let folder = Folder::new();
    let start = |_| {
        Peer::start_with("", |command| {
            contain(command, MAPPED, &folder.sharing(""));
            on_an_old_kernel(command);
        })
    };
    share_and_die(start);
    share_by_descriptor(on_an_old_kernel);
    // Without namespaces too, where the ids have a meaning.
    share_and_die(|_| Peer::start_with("", on_an_old_kernel));
    std::fs::read_dir(&folder.0).unwrap().flatten().for_each(|file| std::fs::remove_file(file.path()).unwrap());
    folder.end();
}

#[test]
fn an_abstract_name_does_not_reach_another_network_and_the_hint_names_the_remedy() {
    if !has_namespaces() {
        return;
    }
    let mut exporter = container(MAPPED, "");
    let ticket: Ticket = exporter.tell("make a 10 1").parse().unwrap();
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let error = runtime.open_shared::<u32>(&ticket).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Expired, "{error}");
    assert!(error.hint().contains("`rendezvous`") && error.hint().contains("HIGHWATER_SHARING"), "{}", error.hint());
    assert!(exporter.quit().success());
}

#[test]
fn a_user_without_an_id_is_nobody_and_needs_the_secret() {
    if !has_namespaces() {
        return;
    }
    let folder = Folder::new();
    // In this namespace, every user has the overflow id: the exporter's own and that of every other process.
    let mut exporter = container(UNMAPPED, &folder.sharing(""));
    let ticket = exporter.tell("make a 10 1");
    for namespaces in [UNMAPPED, MAPPED] {
        let mut importer = container(namespaces, &folder.sharing(""));
        let answer = importer.ask(&format!("open a {ticket}"));
        assert!(answer.starts_with("error PermissionDenied"), "{namespaces}: {answer}");
        assert!(answer.contains("a user without an id here"), "{namespaces}: {answer}");
        assert!(importer.quit().success());
    }
    assert!(exporter.quit().success());

    let mut exporter = container(UNMAPPED, &folder.sharing(",openers=secret"));
    let ticket = exporter.tell("make a 10 1");
    let mut importer = container(UNMAPPED, &folder.sharing(",openers=secret"));
    importer.tell(&format!("open a {ticket}"));
    assert_eq!(importer.tell("read a"), "1");
    assert!(importer.quit().success() && exporter.quit().success());
    folder.end();
}

#[test]
fn one_user_has_many_ids_and_one_id_many_users() {
    if !has_namespaces() {
        return;
    }
    let (exporters, importers) = inherited_pair();
    let (to_export, to_import) = (exporters.as_raw_fd(), importers.as_raw_fd());
    let start = |number: i32, change: &dyn Fn(&mut Command)| {
        Peer::start_with("", |command| {
            contain(command, MAPPED, &format!("rendezvous=descriptor:{number}"));
            inherit(command, number);
            change(command);
        })
    };
    let mut exporter = start(to_export, &|_| {});
    let ticket = exporter.tell("make a 10 1");
    // The same user, with another id: 0 there, and 1234 here.
    let mut importer = Peer::start_with("", |command| {
        contain(command, "-Unpifm", &format!("rendezvous=descriptor:{to_import}"));
        let arguments: Vec<_> = command.get_args().map(OsStr::to_owned).collect();
        let mut mapped = Command::new("unshare");
        mapped.args(["--map-user=1234", "--map-group=1234"]).args(arguments);
        mapped.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        mapped.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        inherit(&mut mapped, to_import);
        *command = mapped;
    });
    assert_eq!(importer.tell(&format!("open a {ticket}")), "10");
    assert!(importer.quit().success());

    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped in part: only the superuser can start processes of other users");
    } else {
        // Another user, with the same id: both are 0 in their namespaces.
        let copy = std::env::temp_dir().join(format!("test-of-one-id-{}", std::process::id()));
        let copied = Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&copy).status();
        assert!(copied.unwrap().success());
        let mut importer = start(to_import, &|command| {
            let arguments: Vec<_> = command.get_args().map(OsStr::to_owned).collect();
            let program = std::env::current_exe().unwrap();
            let arguments = arguments.into_iter().map(|word| if word == program { copy.clone().into() } else { word });
            let mut other = Command::new("unshare");
            other.args(arguments.collect::<Vec<std::ffi::OsString>>()).current_dir("/").uid(1001).gid(1001);
            other.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            other.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
            inherit(&mut other, to_import);
            *command = other;
        });
        let answer = importer.ask(&format!("open a {ticket}"));
        assert!(answer.starts_with("error PermissionDenied"), "{answer}");
        assert!(answer.contains("a user without an id here"), "{answer}");
        assert!(importer.quit().success());
        std::fs::remove_file(&copy).unwrap();
    }
    assert!(exporter.quit().success());
}

/// An exporter in this process.
fn runtime(rendezvous: Rendezvous, openers: Openers) -> Runtime {
    let sharing = SharingOptions::new().with_rendezvous(rendezvous).with_openers(openers);
    let options = RuntimeOptions::new().with_sharing(sharing);
    Runtime::with_options(MockGpu::open(MockOptions::new()).unwrap(), &options).unwrap()
}

#[test]
fn a_ticket_without_its_secret_opens_nothing() {
    let (exporter, importer) = (
        runtime(Rendezvous::Abstract, Openers::Secret),
        // The importer needs no option: the exporter belongs to its user.
        runtime(Rendezvous::Abstract, Openers::SameUser),
    );
    let device = exporter.device(0).unwrap();
    let buffers = [device.allocate_shared::<u32>(10).unwrap(), device.allocate_shared::<u32>(10).unwrap()];
    let tickets = buffers.each_ref().map(|buffer| buffer.share().unwrap());
    assert!(tickets.iter().all(Ticket::has_secret));
    assert_ne!(tickets[0].to_bytes()[112..128], tickets[1].to_bytes()[112..128], "each allocation has its own");
    assert_eq!(tickets[0].to_bytes()[112..128], buffers[0].share().unwrap().to_bytes()[112..128]);
    // None, another one, that of another allocation.
    let other: [u8; 16] = tickets[1].to_bytes()[112..128].try_into().unwrap();
    let wrong = [
        forged(&tickets[0], |bytes| {
            bytes[8] &= !32;
            bytes[112..128].fill(0);
        }),
        forged(&tickets[0], |bytes| bytes[127] ^= 1),
        forged(&tickets[0], |bytes| bytes[112..128].copy_from_slice(&other)),
    ];
    let refused = |kind: ErrorKind| {
        for ticket in &wrong {
            let error = importer.open_shared::<u32>(ticket).map(drop).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.message().contains("secret"), "{error}");
        }
    };
    refused(ErrorKind::PermissionDenied);
    assert_eq!(exporter.statistics().sharing.peers, 0);
    let opened = importer.open_shared::<u32>(&tickets[0]).unwrap();
    // Not with the mapping of the right one either.
    refused(ErrorKind::InvalidArgument);
    // A batch carries the secrets too.
    let slices: Vec<_> = buffers.iter().map(highwater_core::DeviceSlice::from).collect();
    let batch = exporter.share_all(&slices).unwrap().to_bytes();
    let all = importer.open_shared_all::<u32>(&highwater_core::TicketBatch::from_bytes(&batch).unwrap()).unwrap();
    assert_eq!(all.len(), 2);
    // An importer shares what it opened, with the same secret.
    assert_eq!(opened.share().unwrap().to_bytes()[112..128], tickets[0].to_bytes()[112..128]);
    drop((opened, all, importer));
}

#[test]
fn another_users_process_is_let_in_by_its_group_or_by_the_secret() {
    const GROUP: u32 = 54321;
    if !rustix::process::geteuid().is_root() {
        // Only the superuser can become somebody else; the tests of `identity.rs` check the rule.
        eprintln!("skipped: only the superuser can start processes of other users");
        return;
    }
    let folder = Folder::new();
    std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o711)).unwrap();
    let copy = std::env::temp_dir().join(format!("test-of-a-group-{}", std::process::id()));
    let copied = Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&copy).status();
    assert!(copied.unwrap().success());
    // The importer is another user, which may not list the directory.
    let importer = |groups: &'static [u32], gid: u32, openers: &str| {
        let sharing = folder.sharing(&format!(",openers={openers}"));
        Peer::start_with("", |command| {
            let mut other = Command::new(&copy);
            other.args(command.get_args().map(OsStr::to_owned).collect::<Vec<_>>());
            other.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            other.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).current_dir("/");
            other.env("HIGHWATER_SHARING", sharing);
            // SAFETY: between fork and exec the child only makes system calls.
            unsafe {
                other.pre_exec(move || {
                    let become_other = libc::setgroups(groups.len(), groups.as_ptr()) == 0
                        && libc::setgid(gid) == 0
                        && libc::setuid(65534) == 0;
                    if become_other { Ok(()) } else { Err(std::io::Error::last_os_error()) }
                });
            }
            *command = other;
        })
    };
    let exporter = runtime(Rendezvous::Directory(folder.path()), Openers::Group(GROUP));
    let buffer = exporter.device(0).unwrap().allocate_shared::<u32>(10).unwrap();
    let ticket = buffer.share().unwrap();
    let own_group = rustix::process::getegid().as_raw();
    let trusts = format!("group:{own_group}");
    for (groups, gid, openers, expected) in [
        (&[][..], GROUP, trusts.as_str(), "10"),
        (&[7, GROUP][..], 65534, trusts.as_str(), "10"),
        (&[7][..], 65534, trusts.as_str(), "error PermissionDenied"),
        // The importer does not trust the exporter's user.
        (&[][..], GROUP, "user", "error PermissionDenied"),
    ] {
        let mut peer = importer(groups, gid, openers);
        let answer = peer.ask(&format!("open a {ticket}"));
        assert!(answer.starts_with(expected), "{groups:?} {gid} {openers}: {answer}");
        peer.quit();
    }
    drop((buffer, exporter));
    let own = runtime(Rendezvous::Directory(folder.path()), Openers::SameUser);
    let buffer = own.device(0).unwrap().allocate_shared::<u32>(10).unwrap();
    let mut peer = importer(&[], 65534, "secret");
    let answer = peer.ask(&format!("open a {}", buffer.share().unwrap()));
    assert!(answer.starts_with("error PermissionDenied") && answer.contains("only processes of its user"), "{answer}");
    peer.quit();
    drop((buffer, own));
    let secret = runtime(Rendezvous::Directory(folder.path()), Openers::Secret);
    let buffer = secret.device(0).unwrap().allocate_shared::<u32>(10).unwrap();
    let mut peer = importer(&[], 65534, "secret");
    assert_eq!(peer.ask(&format!("open a {}", buffer.share().unwrap())), "10");
    peer.quit();
    drop((buffer, secret));
    std::fs::remove_file(&copy).unwrap();
    folder.end();
}

#[test]
fn a_place_that_cannot_be_used_is_refused_when_the_runtime_is_made() {
    let open = |rendezvous| {
        let options = RuntimeOptions::new().with_sharing(SharingOptions::new().with_rendezvous(rendezvous));
        Runtime::with_options(MockGpu::open(MockOptions::new()).unwrap(), &options).map(drop)
    };
    let refused = |rendezvous, text: &str, hint: &str| {
        let error = open(rendezvous).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.message().contains(text) && error.hint().contains(hint), "{error}: {}", error.hint());
    };
    refused(Rendezvous::Directory(Path::new("/nowhere")), "/nowhere, cannot be opened", "create it");
    let folder = Folder::new();
    std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o777)).unwrap();
    refused(Rendezvous::Directory(folder.path()), "lets every user replace", "chmod +t");
    std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o1777)).unwrap();
    open(Rendezvous::Directory(folder.path())).unwrap();
    folder.end();

    let (ours, _theirs) = inherited_pair();
    open(Rendezvous::Descriptor(ours.as_raw_fd())).unwrap();
    // The original stays open, for the next runtime.
    open(Rendezvous::Descriptor(ours.as_raw_fd())).unwrap();
    let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    refused(Rendezvous::Descriptor(stream.as_raw_fd()), "is not an end of a pair", "socketpair(");
    refused(Rendezvous::Descriptor(1 << 20), "cannot be used", "socketpair(");
}

#[test]
fn an_importer_follows_the_ticket_and_says_what_it_lacks() {
    let folder = Folder::new();
    let exporter = runtime(Rendezvous::Directory(folder.path()), Openers::SameUser);
    let buffer = exporter.device(0).unwrap().allocate_shared::<u32>(10).unwrap();
    let ticket = buffer.share().unwrap();
    assert_eq!(ticket.rendezvous(), "directory");
    let importer = runtime(Rendezvous::Abstract, Openers::SameUser);
    let error = importer.open_shared::<u32>(&ticket).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.message().contains("`directory`") && error.hint().contains("rendezvous=directory:"), "{error}");
    // The other way round, nothing is lacking.
    let own = importer.device(0).unwrap().allocate_shared::<u32>(10).unwrap();
    drop(exporter.open_shared::<u32>(&own.share().unwrap()).unwrap());
    drop((buffer, exporter));
    folder.end();
}

#[test]
fn garbage_at_the_inherited_end_harms_nobody() {
    let (exporters, importers) = inherited_pair();
    let exporter = runtime(Rendezvous::Descriptor(exporters.as_raw_fd()), Openers::SameUser);
    let buffer = exporter.device(0).unwrap().allocate_shared::<u32>(10).unwrap();
    let ticket = buffer.share().unwrap();
    for garbage in [&b"x"[..], b"HWSH\x14\0\0\0", &[0; 2000], HELLO] {
        rustix::net::send(&importers, garbage, rustix::net::SendFlags::NOSIGNAL).unwrap();
    }
    let importer = runtime(Rendezvous::Descriptor(importers.as_raw_fd()), Openers::SameUser);
    // A ticket of another exporter: the one that reads this end says so.
    let strange = forged(&ticket, |bytes| bytes[32] ^= 1);
    let error = importer.open_shared::<u32>(&strange).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Expired, "{error}");
    assert!(error.message().contains("another exporter has this end"), "{error}");
    drop(importer.open_shared::<u32>(&ticket).unwrap());
    // Once nobody holds the other end, an open does not wait for an answer.
    drop((buffer, exporter, exporters));
    let another = runtime(Rendezvous::Descriptor(importers.as_raw_fd()), Openers::SameUser);
    let started = std::time::Instant::now();
    let error = another.open_shared::<u32>(&ticket).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Expired, "{error}");
    assert!(started.elapsed() < std::time::Duration::from_secs(5), "{:?}", started.elapsed());
}
