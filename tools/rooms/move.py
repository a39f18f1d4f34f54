import pathlib, re, subprocess, sys
root=pathlib.Path('.')
def git(*a): subprocess.run(['git',*a],check=True)
MODS={ # old module -> new module
 'act.session':'session.lifecycle','act.fence':'session.fence','act.own_file':'lease.own_file','act.destructors':'session.destructors','act.waiting':'session.waiting','app.idle':'app.report.idle','act.recorder':'session.recorder',
 'act.run_directory':'session.run_directory','act.board':'session.messages',
 'act.hands':'clocks.actuator','act.conductor':'clocks.conductor','act.rehearsal':'clocks.rehearsal',
 'act.lease':'lease.lease','act.journal':'lease.journal','act.watcher':'lease.watcher',
 'act.fitter':'memory.controller','act.floor':'memory.state_and_weights','act.room':'memory.usable_bytes',
 'act.schedule':'memory.schedule','act.size':'memory.size','act.divided':'memory.divided',
 'plan.governor':'clocks.plan.governor','plan.guard':'clocks.plan.guard','plan.roles':'clocks.plan.roles',
 'plan.job_clocks':'clocks.plan.job','plan.branches':'parallel.plan',
 'plan.swap.unhurried':'memory.plan.delay_loads',
 'observe.data':'memory.engine.pass_record','observe.marks':'observe.iteration_clock','observe.window':'observe.profiler_window',
 'app.report':'app.report.build','app.html':'app.report.html','app.plots':'app.report.plots','app.svg':'app.report.svg',
 'app.summary':'app.report.summary','app.evidence':'app.report.evidence','app.operations':'app.report.operations',
 'app.memory_report':'app.report.memory','app.memory_plots':'app.report.memory_plots','app.opening':'app.report.words',
 'app.voice':'app.listener','device.base':'device.protocol',
}
PACK={'act.swapper':'memory.engine','plan.swap':'memory.plan','act.branches':'parallel','sim':'device.sim'}
DOC={
 'clocks':'Clocks: settings that save energy under a slow-down contract.',
 'clocks.plan':'Pure planning of clocks: which setting to try, how it is judged, what is decided.',
 'lease':'The lease: the only way to a setter, and what puts settings back.',
 'memory':'Device memory: budgets that a job is made to fit.',
 'session':'The life of one run.',
 'app.report':'What a user reads about a run: summary, report, plots.',
}
src=root/'src/kilter'
pairs=[]
files={'.'.join(f.relative_to(src).with_suffix('').parts):f for f in src.rglob('*.py')}
def target(m):
    if m in MODS: return MODS[m]
    for p,q in PACK.items():
        if m==p+'.__init__': return q+'.__init__'
        if m.startswith(p+'.'): return q+m[len(p):]
    return None
moved={}
for m,f in sorted(files.items()):
    t=target(m)
    if t is None or t==m: continue
    moved[m]=t
# app.report is a module now and a package afterwards: move via temp
for m in sorted(moved,key=lambda m:0):
    f=files[m]; tmp=f.with_name('__moving_'+f.name) if m=='app.report' else None
    if tmp: git('mv',str(f),str(tmp)); files[m]=tmp
for m,t in moved.items():
    d=src/pathlib.Path(*t.split('.')).with_suffix('.py'); d.parent.mkdir(parents=True,exist_ok=True)
    git('mv',str(files[m]),str(d))
for p,q in PACK.items(): # data files of packages
    old=src/pathlib.Path(*p.split('.'))
    if old.exists():
        for f in sorted(old.rglob('*')):
            if f.is_file() and '__pycache__' not in f.parts:
                d=src/pathlib.Path(*q.split('.'))/f.relative_to(old); d.parent.mkdir(parents=True,exist_ok=True); git('mv',str(f),str(d))
for p,text in DOC.items():
    f=src/pathlib.Path(*p.split('.'))/'__init__.py'; f.parent.mkdir(parents=True,exist_ok=True)
    if not f.exists(): f.write_text(f'"""{text}"""\n'); git('add',str(f))
for p in ('act','plan'):
    f=src/p/'__init__.py'
    if f.exists(): git('rm','-q','-f',str(f))
# tests
T={
 'core':['pure/test_codec','pure/test_units','pure/test_ranks','pure/test_secrets'],
 'model':['pure/test_curve','pure/test_intervals','pure/test_power','pure/test_roofline','pure/test_stats'],
 'observe':['pure/test_cycle','pure/test_imports','pure/test_kineto','pure/test_mentions','pure/test_traffic','sim/test_sampler','torch_cpu/test_marks=test_iteration_clock','torch_cpu/test_window=test_profiler_window','torch_cpu/test_roles','torch_cpu/observed'],
 'device':['contract/test_device_null','contract/test_device_nvidia_fake','contract/test_device_replay','contract/test_device_sim','contract/test_fake_nvml_signatures','pure/test_find','pure/test_worker','sim/test_sim_gpu','sim/test_sim_job','sim/test_replay'],
 'lease':['contract/test_lease_kill','sim/test_lease','contract/test_restore_verb'],
 'clocks':['pure/test_governor','pure/test_guard','sim/test_conductor','sim/test_rehearsal','sim/test_roles','sim/test_scenarios'],
 'memory':['pure/test_plan_weights','pure/test_host_memory','pure/test_swap*','torch_cpu/test_divided','torch_cpu/test_memory_*','torch_cpu/test_size','torch_cpu/test_state*','torch_cpu/test_swapper_*','torch_cpu/test_weights*'],
 'parallel':['pure/test_branches_plan','torch_cpu/test_branches*'],
 'session':['pure/test_fence','torch_cpu/test_session','contract/test_session_nvml','sim/test_recorder'],
 'connect':['torch_cpu/test_launcher'],
 'app':['surface/test_*','pure/test_report','pure/test_memory_report','pure/test_svg','pure/test_swap_cli=test_plan_memory_cli','pure/test_tables'],
}
tests=root/'tests'
done=set()
order=['app','core','model','observe','device','lease','clocks','parallel','session','connect','memory']
for room in order:
    for pat in T[room]:
        pat,_,name=pat.partition('=')
        for f in sorted(tests.glob(pat+'.py')):
            d=tests/room/((name or f.stem)+'.py'); d.parent.mkdir(exist_ok=True)
            assert not d.exists(),d
            git('mv',str(f),str(d))
if (tests/'contract/kill_at_line').exists(): git('mv','tests/contract/kill_at_line','tests/lease/kill_at_line')
left=[str(f) for d in ('pure','contract','sim','surface','torch_cpu') for f in (tests/d).rglob('*.py')] if True else []
print('tests left to place:',left)
# rewrite names
ren=dict(moved)
dots=[('kilter.'+a,'kilter.'+b) for a,b in ren.items()]
dots+=[('kilter.'+p,'kilter.'+q) for p,q in PACK.items()]
dots.sort(key=lambda x:-len(x[0]))
alt='|'.join(re.escape(a) for a,_ in dots); table=dict(dots)
rx=re.compile(r'(?<![\w.])('+alt+r')(?![\w])')
paths=[]
for a,b in ren.items(): paths.append((a.replace('.','/')+'.py',b.replace('.','/')+'.py'))
for a,b in PACK.items(): paths.append((a.replace('.','/')+'/',b.replace('.','/')+'/'))
paths.sort(key=lambda x:-len(x[0]))
prx=re.compile(r'(?<![\w/])((?:src/kilter/)?)('+'|'.join(re.escape(a) for a,_ in paths)+r')'); ptable=dict(paths)
FROM=re.compile(r'^(\s*)from kilter\.(act|plan|sim|observe|app|device|plan\.swap|act\.swapper|act\.branches) import (.+)$',re.M)
def fix_from(m):
    indent,pack,names=m.groups()
    if '(' in names: 
        print('FROM by hand:',m.group(0)); return m.group(0)
    out=[]; keep=[]
    for n in names.split(','):
        n=n.strip(); base=n.split(' as ')[0]; al=n[len(base):]
        full=pack+'.'+base
        if full in ren:
            new=ren[full]; p,_,b=new.rpartition('.')
            out.append(f'{indent}from kilter.@@{p} import {b}'+(al or (f' as {base}' if b!=base else '')))
        else: keep.append(n)
    if keep: out.insert(0,f'{indent}from kilter.{pack} import {", ".join(keep)}')
    return '\n'.join(out)
tracked=subprocess.run(['git','ls-files','-c','-o','--exclude-standard'],capture_output=True,text=True).stdout.split('\n')
for name in tracked:
    f=root/name
    if not name or not f.is_file() or f.suffix not in ('.py','.toml','.md','.cpp','') or f.name=='LICENSE': continue
    s=f.read_text()
    t=FROM.sub(fix_from,s)
    t=rx.sub(lambda m:table[m.group(1)],t)
    t=t.replace('kilter.@@','kilter.')
    if f.suffix in ('.md','.py'): t=prx.sub(lambda m:m.group(1)+ptable[m.group(2)],t)
    if t!=s: f.write_text(t)
