"""Attempts of the machine and of whoever types: limits, signals, streams, environment, options that contradict."""

from collections.abc import Callable

from tests.attacks.second.lab import Attempt, Lab, Outcome

COLLECT = "$H collect $W/data -o store --target $W/target --layers 0,1,2 -q"
TRAIN = (
    "$H train $W/store -o run train.max_steps=6 train.checkpoint_every=2 loss.steps=2 data.batch_tokens=512"
    " data.pack_tokens=256 train.validate_every=0 -q"
)
PREPARE = "$H prepare $W/chats.jsonl -o data --target $W/target -q"
COPY = "$H copy $W/store other --recipe compact -q"


def shell(script: str, **environ: str | None) -> Callable[[Lab], Outcome]:
    """A script in which ``$H`` is the command line and ``$W`` the world."""
    return lambda lab: lab.shell(script, W=str(lab.world.root), **environ)


def then_same(script: str, **environ: str | None) -> Callable[[Lab], Outcome]:
    """After the script the plain command finishes the store, which is the world's."""

    def do(lab: Lab) -> Outcome:
        broken = lab.shell(script, W=str(lab.world.root), **environ)
        assert "Traceback" not in broken.err, f"traceback: {broken.err[-300:]}"
        assert "[internal]" not in broken.err, f"internal: {broken.err[-300:]}"
        assert broken.code, f"nothing happened: {broken.err}"
        ended = lab.shell(COLLECT, W=str(lab.world.root))
        lab.require_same(lab.folder / "store")
        return ended

    return do


def signalled(command: str, signal: str, seconds: float, again: str, check: str) -> Callable[[Lab], Outcome]:
    """A signal to the command after so many seconds; then the same again, and a check."""
    script = f"({command}) & P=$!; sleep {seconds}; kill -{signal} -- -$P; wait $P"

    def do(lab: Lab) -> Outcome:
        first = lab.shell(f"set -m; {script}", W=str(lab.world.root))
        assert "Traceback" not in first.err, f"traceback: {first.err[-400:]}"
        assert "[internal]" not in first.err, f"traceback: {first.err[-400:]}"
        return lab.shell(f"({again}) && {check}", W=str(lab.world.root))

    return do


def stopped(lab: Lab) -> Outcome:
    """Stopped for a while in the middle, while another does the work; then continued."""
    both = f"{COLLECT}; kill -CONT -- -$P; wait $P"
    script = f"set -m; ({COLLECT}) & P=$!; sleep 4; kill -STOP -- -$P; {both}"
    ended = lab.shell(script, W=str(lab.world.root))
    lab.require_same(lab.folder / "store")
    return ended


def typed(*words: str, setup: Callable[[Lab], object] | None = None) -> Callable[[Lab], Outcome]:
    """Words in this process; ``W/name`` is a thing of the world."""

    def do(lab: Lab) -> Outcome:
        if setup is not None:
            setup(lab)
        return lab.run(*(str(lab.path(word[2:])) if word.startswith("W/") else word for word in words))

    return do


FIT = ("loss.steps=2", "data.batch_tokens=512", "data.pack_tokens=256", "train.validate_every=0")
BAD = "config-invalid|option-invalid|usage"

# fmt: off
ATTEMPTS = (
    *(
        Attempt(f"options: {' '.join(words)}", typed(*words), word)
        for words, word in (
            (("ls", "W/store", "--where", "tokens>1e400"), BAD),
            (("ls", "W/store", "--where", "tokens>NaN"), BAD),
            (("ls", "W/store", "--where", "tokens>" + "9" * 5000), f"held|{BAD}"),
            (("ls", "W/store", "--where", "tokens>>4"), BAD),
            (("ls", "W/store", "--where", "__class__>4"), BAD),
            (("ls", "W/store", "--where", ""), "held"),
            (("show", "W/store", "-1"), f"sample-missing|{BAD}"),
            (("show", "W/store", "9" * 30), "sample-missing"),
            (("show", "W/store", ""), f"sample-missing|sample-ambiguous|{BAD}|held"),
            (("show", "W/store", "../../etc/passwd"), "sample-missing"),
            (("show", "W/store", "٣"), "sample-missing"),
            (("info", "W/store@"), f"snapshot-missing|store-missing|name-invalid|{BAD}|held"),
            (("info", "W/store@../../x"), "snapshot-missing|store-missing|name-invalid"),
            (("info", "W/store@a@b"), "snapshot-missing|store-missing|name-invalid"),
            (("snapshot", "W/store", "../x"), "name-invalid|usage"),
            (("snapshot", "W/store", ".hidden"), "name-invalid|usage"),
            (("snapshot", "W/store", "a" * 300), "name-invalid|usage|path-invalid"),
            (("gc", "W/store", "--older-than", "-1h"), BAD),
            (("gc", "W/store", "--older-than", "1e400d"), BAD),
            (("gc", "W/store", "--older-than", "nan"), BAD),
            (("gc", "W/store", "--older-than", "9" * 400 + "d"), f"held|{BAD}"),
            (("repair", "W/store", "--accept-loss", "9" * 40), "held"),
            (("verify", "W/store", "--share", "nan"), BAD),
            (("verify", "W/store", "--share", "1e-320", "--meaning"), "held"),
            (("prepare", "W/chats.jsonl", "-o", "d", "--target", "W/target", "--val", "nan%"), BAD),
            (("prepare", "W/chats.jsonl", "-o", "d", "--target", "W/target", "--val", "100%"), f"held|{BAD}"),
            (("prepare", "W/chats.jsonl", "-o", "d", "--target", "W/target", "--val", "1e-400"), f"held|{BAD}"),
            (("prepare", "W/chats.jsonl", "W/chats.jsonl", "-o", "d", "--target", "W/target"), "held"),
            (("prepare", "W/chats.jsonl", "-o", "/dev/null", "--target", "W/target"), "output-exists|path-invalid"),
            (("prepare", "W/chats.jsonl", "-o", "W/data/inner", "--target", "W/target"), "held|output-exists"),
            (("collect", "W/data", "-o", "W/data", "--target", "W/target"), "output-exists|store-missing|path-invalid|store-mismatch"),
            (("collect", "W/data", "-o", "/dev/null", "--target", "W/target"), "output-exists|path-invalid|io-error"),
            (("collect", "W/data", "-o", "s", "--target", "W/target", "--layers", "0,0"), "layers-invalid"),
            (("collect", "W/data", "-o", "s", "--target", "W/target", "--layers", "99999999999999999999"), "layer-missing|layers-invalid"),
            (("collect", "W/data", "-o", "s", "--target", "W/target", "--layers", "٠,١"), f"layers-invalid|layer-missing|{BAD}|name-unknown|held"),
            (("collect", "W/data", "-o", "s", "--target", "W/target", "--recipe", "aux=q8,aux=q4"), f"name-unknown|{BAD}"),
            (("collect", "W/data", "-o", "s", "--target", "W/target", "--engine-arg", "=x"), "engine-arg|option-invalid|usage"),
            (("collect", "W/data", "-o", "s", "--target", "W/store"), "target-incomplete|target-unreadable"),
            (("collect", "W/store", "-o", "s", "--target", "W/target"), "path-missing|input-unreadable"),
            (("train", "W/store", "-o", "r", *FIT, "train.max_steps=-1"), BAD),
            (("train", "W/store", "-o", "r", *FIT, "train.max_steps=true"), BAD),
            (("train", "W/store", "-o", "r", *FIT, "train.max_steps=1e400"), BAD),
            (("train", "W/store", "-o", "r", *FIT, "optim.lr=nan"), BAD),
            (("train", "W/store", "-o", "r", *FIT, "optim.lr=inf"), BAD),
            (("train", "W/store", "-o", "r", *FIT, "optim.lr=0x10"), BAD),
            (("train", "W/store", "-o", "r", *FIT, "train.seed=" + "9" * 40), f"held|{BAD}"),
            (("train", "W/store", "-o", "r", *FIT, "train.seed=-1", "train.max_steps=1"), f"held|{BAD}"),
            (("train", "W/store", "-o", "r", *FIT, "data.seed=-1", "train.max_steps=1"), f"held|{BAD}"),
            (("train", "W/store", "-o", "r", "data.pack_tokens=1"), f"sample-too-long|{BAD}|pack-invalid"),
            (("train", "W/store", "-o", "r", *FIT, "__class__.x=1"), "config-unknown-key|usage"),
            (("train", "W/store", "-o", "r", *FIT, "train..max_steps=1"), "config-unknown-key|usage|config-invalid"),
            (("train", "W/store", "-o", "r", *FIT, "=1"), "config-unknown-key|usage|config-invalid|option-invalid"),
            (("train", "W/store", "-o", "r", *FIT, "train.max_steps=1", "train.max_steps=2"), f"held|{BAD}"),
            (("train", "W/store", "-o", "W/store/run", *FIT, "train.max_steps=1"), "held|output-exists|option-invalid"),
            (("train", "W/store", "-o", "r", "--resume", "--resume-from", "W/run/checkpoints/step-2"), BAD),
            (("train", "W/store", "-o", "r", "--resume-from", "W/run/checkpoints/step-2", "optim.lr=1"), "resume-settings|config-invalid"),
            (("train", "W/store", "-o", "r", "--follow", *FIT), BAD),
            (("train", "W/store", "-o", "r", "--cache", "W/chats.jsonl", *FIT, "train.max_steps=1"), "held|path-invalid|io-error|output-exists|option-invalid"),
            (("eval", "W/run", "W/store", "--draft-len", "0"), BAD),
            (("eval", "W/run", "W/store", "--draft-len", "1000000"), f"held|{BAD}|no-tree|drafter-contradiction"),
            (("eval", "W/run", "W/store", "--draft-len", "5x0"), BAD),
            (("eval", "W/run", "W/store", "--draft-len", "9" * 40), BAD),
            (("eval", "W/run", "W/store", "--draft-len", ""), BAD),
            (("eval", "W/store", "W/run"), "run-missing|store-missing|checkpoint-missing"),
            (("eval", "W/run/checkpoints/LATEST", "W/store"), "held"),
            (("export", "W/run", "--engine", "vllm", "--engine-version", "x", "-o", "e"), "engine-version|option-invalid|export-unsupported"),
            (("export", "W/run", "--engine", "vllm", "--engine-version", "9" * 40, "-o", "e"), "engine-version|option-invalid|export-unsupported|held"),
            (("export", "W/run", "--engine", "vllm", "--yarn", "nan", "2048", "-o", "e"), BAD),
            (("export", "W/run", "--engine", "vllm", "--yarn", "-2", "2048", "-o", "e"), BAD),
            (("export", "W/run", "--engine", "vllm", "-o", "-"), "held"),
            (("export", "W/run", "--engine", "vllm", "-o", "/dev/null"), "output-exists|path-invalid"),
            (("export", "W/run", "--engine", "speculators", "--target", "x\n--trust-remote-code", "-o", "e"), "held|option-invalid"),
            (("vocab", "W/store", "--size", "-5"), BAD),
            (("vocab", "W/store", "--size", "9" * 30), f"vocab-invalid|{BAD}|held"),
            (("copy", "W/store", "c", "--where", "tokens>10**9"), BAD),
            (("copy", "W/store", "c", "--where", "tokens>1000000"), "selection-empty"),
            (("diff", "W/store", "W/store"), "held"),
            (("advise", "W/store/commits"), "store-missing"),
            (("log", "W/store", "--json", "-q"), "held"),
        )
    ),
    *(
        Attempt(f"the machine: {what}", do, word)
        for what, do, word in (
            ("ulimit -f 8 while collecting", then_same(f"ulimit -f 8; {COLLECT}"), "held"),
            ("ulimit -f 64 while collecting", then_same(f"ulimit -f 64; {COLLECT}"), "held"),
            ("ulimit -f 8 while preparing", shell(f"ulimit -f 1; {PREPARE}"), "disk-full|io-error"),
            ("ulimit -f 8 while copying", shell(f"ulimit -f 8; {COPY}"), "disk-full|io-error"),
            ("ulimit -f 64 while training", shell(f"ulimit -f 64; {TRAIN}"), "disk-full|io-error"),
            ("ulimit -f 8 while exporting", shell("ulimit -f 8; $H export $W/run --engine vllm -o out"), "disk-full|io-error"),
            ("ulimit -n 16", shell("ulimit -n 16; $H verify $W/store --full"), "held|io-error"),
            ("ulimit -n 32 while collecting", shell(f"ulimit -n 32; {COLLECT}"), "held|io-error"),
            ("ulimit -n 32 while training", shell(f"ulimit -n 32; {TRAIN}"), "held|io-error"),
            ("ulimit -v 1 GB", shell("ulimit -v 1000000; $H verify $W/store --full"), "held|out-of-memory|too-many-threads"),
            ("umask 777", then_same(f"umask 777; {COLLECT}; chmod -R u+rwX store; false"), "held"),
            ("stdout closed", shell("$H info $W/store >&-"), "held"),
            ("stdout full", shell("$H info $W/store > /dev/full"), "disk-full|io-error|exit 1"),
            ("stdout full, json", shell("$H ls $W/store --json > /dev/full"), "disk-full|io-error|exit 1"),
            ("stderr full", shell("$H verify $W/store 2> /dev/full"), "held"),
            ("stdin, stdout and stderr closed", shell("$H info $W/store <&- >&- 2>&-"), "held|exit 1"),
            ("stdout a pipe nobody reads", shell("$H ls $W/store -n 0 | true; exit ${PIPESTATUS[0]}"), "held|exit 141"),
            ("LANG=C and a name of Chinese", shell("cp -r $W/store 数据; $H verify 数据", LANG="C", LC_ALL="C", PYTHONUTF8="0"), "held"),
            ("LC_ALL of nowhere", shell("$H show $W/store 0", LC_ALL="xx_YY.UTF-8"), "held"),
            ("PYTHONIOENCODING=ascii", shell("$H show $W/store 0", PYTHONIOENCODING="ascii"), "held"),
            ("TZ of nowhere", shell("$H log $W/store", TZ="Nowhere/City"), "held"),
            ("no HOME", shell(PREPARE, HOME=None), "held"),
            ("HOME is a file", shell(PREPARE, HOME="/dev/null"), "held"),
            ("TMPDIR does not exist", shell(PREPARE, TMPDIR="/nonexistent"), "held"),
            ("TERM of nobody", shell("$H info $W/store", TERM="nobody", COLUMNS="0"), "held"),
            ("COLUMNS=-5", shell("$H ls $W/store", COLUMNS="-5"), "held"),
            ("COLUMNS of text", shell("$H ls $W/store", COLUMNS="x"), "held"),
            ("python -OO", shell("$H verify $W/store --full", PYTHONOPTIMIZE="2"), "held"),
            ("warnings are errors", shell("$H verify $W/store --full", PYTHONWARNINGS="error"), "held"),
            ("OMP_NUM_THREADS of text", shell(TRAIN, OMP_NUM_THREADS="x"), "held"),
            ("CUDA_VISIBLE_DEVICES of text", shell(TRAIN, CUDA_VISIBLE_DEVICES="x"), "held"),
            ("a proxy that is none", shell(COLLECT, HTTP_PROXY="http://127.0.0.1:1", HTTPS_PROXY="x"), "held"),
            ("the working folder is gone", shell("mkdir d; cd d; rmdir ../d; $H info $W/store"), "held|path-missing|io-error"),
            ("the working folder is gone, relative", shell("mkdir d; cd d; rmdir ../d; $H collect $W/data -o store --target $W/target"), "path-missing|io-error|path-invalid|exit 2"),
            ("HIDDENSTORE_ words", shell("$H info $W/store", HIDDENSTORE_FORMAT="9", HIDDENSTORE_DEBUG="x"), "held"),
            ("WORLD_SIZE alone", shell(COLLECT, WORLD_SIZE="2"), "rank-invalid"),
            ("RANK beyond WORLD_SIZE", shell(COLLECT, WORLD_SIZE="2", RANK="7"), "rank-invalid"),
            ("SIGHUP while collecting", signalled(COLLECT, "HUP", 4, COLLECT, "$H verify store --full"), "held"),
            ("SIGPIPE while collecting", signalled(COLLECT, "PIPE", 4, COLLECT, "$H verify store --full"), "held"),
            ("SIGTERM twice while collecting", signalled(COLLECT, "TERM", 4, COLLECT, "$H verify store --full"), "held"),
            ("SIGQUIT while copying", signalled(COPY, "QUIT", 2, COPY, "$H verify other --full"), "held"),
            ("SIGUSR1 while preparing", signalled(PREPARE, "USR1", 3, f"rm -rf data; {PREPARE}", "true"), "held"),
            ("SIGXCPU while training", signalled(TRAIN, "XCPU", 5, f"test -e run/run.json && $H train $W/store -o run --resume -q || (rm -rf run; {TRAIN})", "$H eval run $W/store -q"), "held"),
            ("SIGHUP while training", signalled(TRAIN, "HUP", 6, f"test -e run/run.json && $H train $W/store -o run --resume -q || (rm -rf run; {TRAIN})", "$H eval run $W/store -q"), "held"),
            ("stopped while another collects, then continued", stopped, "held"),
        )
    ),
)
