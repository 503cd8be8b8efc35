import json,sys,dataclasses,numpy as np,time
from planner.specs.job import Job
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.cost.profile import PROFILES
from scipy.optimize import minimize
trainer=sys.argv[1]; names=sys.argv[2].split(',')
rows=[json.loads(l) for l in open('/work/main/benchmarks/measured/public.jsonl')]
jobs=[(r,Job.from_user(r)) for r in rows if r['training']['trainer']==trainer and 'step_seconds' in r['measured']]
if len(sys.argv)>3: jobs=[x for x in jobs if not x[0]['id'].startswith(tuple(sys.argv[3].split(',')))]
groups={}
for r,j in jobs: groups.setdefault(json.dumps([r['model'],r['cluster'],r['training']],sort_keys=True),[]).append((r,j))
data=[(g[0][1],LayoutBatch.from_layouts([j.layout for _,j in g]),np.array([r['measured']['step_seconds'] for r,_ in g])) for g in groups.values()]
base=PROFILES[trainer]
x0=np.array([getattr(base,n) for n in names])
def errs(x):
    prof=dataclasses.replace(base,**{n:float(v) for n,v in zip(names,x)})
    return np.concatenate([np.log(Pricer.build(j.model,j.cluster,j.training,prof).price(b).step_seconds/m) for j,b,m in data])
def unit(y):
    return np.array([ (1/(1+np.exp(-(np.log(max(x,1e-3)/(1-min(x,.999)))+d))) if n.endswith('hidden') else x*np.exp(d)) for n,x,d in zip(names,x0,y)])
def loss(y):
    e=errs(unit(y)); return np.mean(np.abs(e))+0.01*np.sum((y/0.4)**2)/ max(1,len(e)/20)
t=time.time(); print(trainer,len(jobs),len(data),'start',loss(np.zeros(len(names)))); print('eval s',time.time()-t)
r=minimize(loss,np.zeros(len(names)),method='Nelder-Mead',options=dict(maxfev=int(140)))
print('end',r.fun,dict(zip(names,np.round(unit(r.x),7)))); e=np.expm1(errs(unit(r.x))); print('mape',abs(e).mean(),'bias',e.mean())
