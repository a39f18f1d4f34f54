"""Rename identifiers to the vocabulary, after move.py: by tokens, so prose is not touched."""
import io,pathlib,re,subprocess,tokenize
ALL={'RealHands':'DeviceActuator','SimHands':'SimulatedActuator','Hands':'Actuator',
 'LocalBoard':'LocalMessages','StoreBoard':'StoreMessages','BoardGone':'MessagesGone','Board':'RankMessages',
 '_find_board':'_find_messages','_board':'_messages','_hands':'_actuator',
 'Marks':'IterationClock','Fitter':'MemoryController','Floor':'StateAndWeightPolicy',
 'Voice':'RunListener','Silent':'SilentListener','Stderr':'StderrListener','unhurried':'delay_loads',
 'WINDOW_BORDERS':'WINDOW_ITERATION_ENDS','BORDER':'ITERATION_END','on_border':'on_iteration_end','_border':'_iteration_ended','_borders':'_iteration_ends',
 'remade':'recomputed','remake_s':'recompute_s','remake':'recompute','remaking':'recomputing','_remade':'_recomputed','_remake':'_recompute'}
STRINGS=['RealHands','SimHands','LocalBoard','StoreBoard','BoardGone','Marks','Fitter','unhurried','remade','remake_s']
PROSE=[(r'\bfeature maps\b','activations'),(r'\bfeature map\b','activation'),(r'\bFeature maps\b','Activations'),
 (r'\bmade again\b','recomputed'),(r'\bmake again\b','recompute'),(r'\bmaking again\b','recomputing'),(r'\bmakes again\b','recomputes'),(r'\bMade again\b','Recomputed')]
def name(tok,prev,nxt,n):
    if tok=='border' and 'parallel' not in n: return 'iteration_ended' if prev in('.','def') or n.startswith('tests') else 'iteration_end'
    if tok=='borders' and 'parallel' not in n: return 'iteration_ends'
    if ('clocks' in n or 'session' in n) and tok=='board': return 'messages'
    if ('clocks' in n or 'session' in n) and tok=='hands': return 'actuators' if n.startswith('tests/clocks') else 'actuator'
    if n.startswith('src/kilter/memory') and tok=='room' and nxt in('(','\n',''): return 'usable_device_bytes'
    if tok=='Turn' and n not in('tests/clocks/test_conductor.py','tests/clocks/test_roles.py'): return 'SimulatedIteration'
    return ALL.get(tok,tok)
files=subprocess.run(['git','ls-files','-c','-o','--exclude-standard'],capture_output=True,text=True).stdout.split('\n')
for n in files:
    f=pathlib.Path(n)
    if not n or not f.is_file() or n=='CHANGELOG.md' or n.startswith('docs/measurements') or n.startswith('src/kilter/gone'): continue
    if f.suffix=='.md':
        s=t=f.read_text()
        for a,b in ALL.items():
            if a not in('Board','Hands','Floor','Silent','Voice','Marks') : t=re.sub(rf'\b{a}\b',b,t)
            else: t=re.sub(rf'`{a}`',f'`{b}`',t)
        for a,b in PROSE: t=re.sub(a,b,t)
        if t!=s: f.write_text(t)
        continue
    if f.suffix!='.py': continue
    s=f.read_text(); lines=s.splitlines(keepends=True)
    try: toks=[t for t in tokenize.generate_tokens(io.StringIO(s).readline)]
    except Exception as e: print('TOKENIZE',n,e); continue
    edits=[]
    for i,t in enumerate(toks):
        if t.type==tokenize.NAME:
            prev=toks[i-1].string if i else ''; nxt=toks[i+1].string if i+1<len(toks) else ''
            new=name(t.string,prev,nxt,n)
            if t.string.startswith('test_'): new=t.string.replace('remade','recomputed').replace('remaking','recomputing').replace('remake','recompute')
            if new!=t.string: edits.append((t.start,t.end,new))
        elif t.type in(tokenize.STRING,tokenize.COMMENT) or tokenize.tok_name[t.type].startswith('FSTRING'):
            new=t.string
            for a in STRINGS: new=re.sub(rf'\b{a}\b(?! the )',ALL[a],new)
            for a,b in PROSE: new=re.sub(a,b,new)
            new=re.sub(r'(?<=\.)border\(','iteration_ended(',new); new=re.sub(r'^(["\'])border\1$',r'\1iteration_ended\1',new)
            if new!=t.string: edits.append((t.start,t.end,new))
    if not edits: continue
    for (r,c),(r2,c2),new in reversed(edits):
        head=lines[r-1][:c]; tail=lines[r2-1][c2:]
        lines[r-1:r2]=[head+new+tail]
        if r2>r: lines[r-1:r]=(head+new+tail).splitlines(keepends=True)
    f.write_text(''.join(lines))
p=pathlib.Path('src/kilter/memory/engine/remake.py')
if p.exists(): subprocess.run(['git','mv',str(p),'src/kilter/memory/engine/recompute.py'],check=True)

# --- public names that stood twice: renamed where they are imported from their module
R={('device.sim.profile','Evidence'):'FitEvidence',('observe.kineto','Event'):'TraceEvent',('clocks.conductor','Iteration'):'TimedIteration',
 ('testing.box','Job'):'BoxJob',('memory.engine.kinds','Kind'):'PassKind',('memory.engine.shelf','Moved'):'MovedWeights',
 ('memory.engine.operations','Operation'):'RecomputeRule',('clocks.plan.governor','Outcome'):'BlockOutcome',('memory.plan.simulate','Outcome'):'SimulatedPass',
 ('lease.journal','Outcome'):'RestoreOutcome',('memory.engine.charge','Phase'):'PassPhase',('device.sim.job','Phase'):'JobPhase',
 ('memory.engine.gradients','Place'):'GradientPlace',('lease.journal','Place'):'JournalPlace',('clocks.conductor','Program'):'GovernorProgram',
 ('testing.runs','Recorder'):'RunWriter',('app.bench.faults','Row'):'FaultRow',('device.sim.replay','Row'):'RecordedRow',('memory.schedule','Schedule'):'PlannedPass',
 ('testing.fake_card','State'):'FakeState',('memory.engine.ready','Step'):'ReadyStep',('device.sim.replay','Workload'):'RecordedWorkload',
 ('app.cli.doctor','DISAGREEMENT'):'POWER_DISAGREEMENT',('memory.plan.mix','FINE'):'FINE_STEPS',('clocks.actuator','HOLD_S'):'LOW_SETTING_HOLD_S',
 ('memory.state_and_weights','JUDGED'):'JUDGED_ITERATIONS',('clocks.plan.job','KNOBS'):'SEARCHED_KNOBS',('memory.engine.away','OURS'):'OUR_MODULES',
 ('memory.state_and_weights','PATIENCE'):'POLICY_PATIENCE',('memory.engine.engine','PATIENCE'):'DEVIATION_PATIENCE',('app.cli.plan','REHEARSE_S'):'PLAN_REHEARSAL_S',
 ('clocks.conductor','REPEATS'):'BLOCK_REPEATS',('memory.engine.watch','REPEATS'):'WATCH_REPEATS',('memory.engine.kinds','ROUNDING'):'ALLOCATION_ROUNDING_BYTES',
 ('memory.controller','ROUNDING'):'BOUND_ROUNDING',('memory.plan.weights','SPARE'):'SPARE_FACTOR',('memory.state_and_weights','SPARE'):'SPARE_SHARE',
 ('testing.fake_nvml','STATE_VARIABLE'):'FAKE_STATE_VARIABLE',('memory.plan.joint','WORTH'):'JOINT_WORTH',('device.sim.profile','SCHEMA'):'PROFILE_SCHEMA',
 ('memory.plan.choose','AHEAD'):'AHEAD_S',('memory.plan.state','WINDOWS'):'WINDOW_BUCKETS'}
import ast
bymod={}
for (m,x),y in R.items(): bymod.setdefault('kilter.'+m,{})[x]=y
for n in files:
    f=pathlib.Path(n)
    if f.suffix!='.py': continue
    if not f.is_file(): continue
    s=f.read_text()
    try: tree=ast.parse(s)
    except SyntaxError: print('SYNTAX',n); continue
    me='.'.join(f.with_suffix('').parts[1:]) if n.startswith('src/') else ''
    names={}; mods={}
    if me in bymod: names.update(bymod[me])
    for node in ast.walk(tree):
        if isinstance(node,ast.ImportFrom) and node.module:
            if node.module in bymod:
                for a in node.names:
                    if a.name in bymod[node.module]: names[a.name if not a.asname else '\0'+a.name]=bymod[node.module][a.name]
            for a in node.names:
                full=node.module+'.'+a.name
                if full in bymod: mods[a.asname or a.name]=bymod[full]
        elif isinstance(node,ast.Import):
            for a in node.names:
                if a.name in bymod and a.asname: mods[a.asname]=bymod[a.name]
    # string patches "kilter.x.y.NAME"
    t=s
    for m,d in bymod.items():
        for x,y in d.items(): t=re.sub(rf'{re.escape(m)}\.{x}\b',f'{m}.{y}',t)
    for a in list(mods):
        for x,y in mods[a].items(): t=re.sub(rf'setattr\(({a}), "{x}"',rf'setattr(\1, "{y}"',t)
    lines=t.splitlines(keepends=True)
    toks=list(tokenize.generate_tokens(io.StringIO(t).readline)); edits=[]
    for i,k in enumerate(toks):
        if k.type==tokenize.STRING and k.string[0] in 'fF' and k.start[0]==k.end[0]:
            new=k.string
            for x,y in names.items():
                if x.isupper(): new=re.sub(rf'\b{x}\b(?=[:}}.! ])',y,new)
            if new!=k.string: edits.append((k.start,k.end,new))
        if k.type!=tokenize.NAME: continue
        prev=toks[i-1].string if i else ''; pp=toks[i-2].string if i>1 else ''
        if prev=='.':
            if pp in mods and k.string in mods[pp]: edits.append((k.start,k.end,mods[pp][k.string]))
        elif k.string in names:
            nxt=toks[i+1].string
            if nxt=='=' and toks[i-1].string in('(',',') and not k.string.isupper(): continue
            edits.append((k.start,k.end,names[k.string]))
        elif '\0'+k.string in names and toks[i+1].string=='as': edits.append((k.start,k.end,names['\0'+k.string]))
    for (r,c),(r2,c2),new in reversed(edits):
        lines[r-1]=lines[r-1][:c]+new+lines[r-1][c2:]
    t=''.join(lines)
    # names in docstrings, between backquotes
    for x,y in names.items():
        if x.startswith('\0'): continue
        t=re.sub(rf'`{x}`',f'`{y}`',t)
    if t!=s: f.write_text(t)
